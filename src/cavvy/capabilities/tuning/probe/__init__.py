"""The probe, which runs in the process of the user's script. When the probe receives a command, it
measures a window of steps. During a window, the script runs either without a change or with exactly
one change of its settings.
"""

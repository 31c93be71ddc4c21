"""The probe, which runs in the process of the user's script. When the probe receives a command, it
measures a window of steps. The steps of a window are unchanged or have one change.
"""

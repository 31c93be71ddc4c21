"""Runs in the process of the user's script. On command, the probe measures windows of steps:
unchanged steps, or steps with one change.
"""

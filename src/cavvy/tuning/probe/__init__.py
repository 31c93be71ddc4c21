"""Runs in the process of the user's script. On command, it measures windows of steps, unchanged or
with one thing changed.
"""

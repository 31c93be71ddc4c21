"""Runs a user's script under external commands: windows of steps, unchanged or with one thing
changed.
"""

"""A user's script under commands from outside: windows of steps, as they are or with one thing
changed.
"""

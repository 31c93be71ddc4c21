"""The domain model: data types, units, states, and the allowed transitions between states. Does no
I/O and uses only the standard library.
"""

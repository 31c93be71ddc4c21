"""The domain model: data types, units, states and their legal transitions. No I/O; uses only the
standard library.
"""

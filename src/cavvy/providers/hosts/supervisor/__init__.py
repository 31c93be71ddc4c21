"""The host supervisor: an installation's process on one host. It ends with its connection; agents
stay.

Runs remotely, on Linux with the standard library of Python 3.8 or newer.
"""

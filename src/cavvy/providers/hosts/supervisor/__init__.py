"""The host supervisor: an installation's process on one host. The supervisor exits when its
connection ends; agents keep running.

The supervisor runs on remote Linux hosts, with the standard library of Python 3.8 or newer.
"""

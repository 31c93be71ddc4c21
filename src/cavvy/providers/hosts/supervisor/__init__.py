"""The host supervisor: an installation's process on one host, started over SSH and gone with the
connection; agents stay.

Runs far away: nothing but the standard library, any Python from 3.8 on, Linux. `pack` makes one
file of it.
"""

"""The program of a joined machine: calls the control plane, and relays the messages of the
machine's supervisor.

The program runs on Linux, with the standard library of Python 3.8 or newer.
"""

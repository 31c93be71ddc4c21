"""The program of a joined machine: calls the control plane and relays its supervisor's lines.

Runs on Linux, with the standard library of Python 3.8 or newer.
"""

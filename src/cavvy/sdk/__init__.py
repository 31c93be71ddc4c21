"""The Python interface for notebooks and scripts. Its names are imported from `cavvy`: `from cavvy
import Client, Task`.
"""

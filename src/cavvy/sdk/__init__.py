"""The Python interface for notebooks and scripts. The names are imported from `cavvy`: `from cavvy
import Client, Task`.
"""

"""The Python interface for notebooks and scripts. `cavvy` exports its names: `from cavvy import
Client, Task`.
"""

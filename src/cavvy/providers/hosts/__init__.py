"""The code that all providers of single hosts share. The modules read a machine's resources, and
build offers, agent configurations and records.
"""

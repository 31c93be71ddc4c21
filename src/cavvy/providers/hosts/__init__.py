"""The code that all providers of single hosts share. The modules read a machine's resources, and
builds offers, agent configurations and records.
"""

"""The code that all providers of single hosts share. The code reads a machine's resources, and
builds offers, agent configurations and records.
"""

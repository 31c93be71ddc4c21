"""Contains the code that all providers of single hosts share. It reads a machine's resources, and
makes offers, agent configurations and records.
"""

"""Contains the code that all providers of single hosts share: it reads a machine's resources, and
makes offers, agent configurations and records.
"""

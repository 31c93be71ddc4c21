"""Code shared by providers of single hosts: reads a machine's resources, and makes its offers, its
agents' configurations, and records.
"""

"""Shared code of providers of single hosts: reads a machine's resources, and builds its offers, the
agents' configurations, and records.
"""

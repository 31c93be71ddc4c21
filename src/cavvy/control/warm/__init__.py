"""Gangs that are kept after their work for the next job of the same project: when, for whom, and
who pays.
"""

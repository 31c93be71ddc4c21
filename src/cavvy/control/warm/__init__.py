"""Tracks gangs that, after their work has ended, are kept for the next job of the same project."""

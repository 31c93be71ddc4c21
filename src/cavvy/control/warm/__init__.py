"""Tracks gangs that are kept after their work for the next job of the same project."""

"""Adds `cavvy today`, which shows the jobs of today."""

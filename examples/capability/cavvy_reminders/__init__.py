"""Adds `cavvy remind`, which reminds of something at a time."""

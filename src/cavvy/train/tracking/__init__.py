"""Measures a run's current rates and costs, and sends them to experiment trackers."""

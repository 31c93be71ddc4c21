"""Writes checkpoints atomically in the background, at an interval derived from their cost."""

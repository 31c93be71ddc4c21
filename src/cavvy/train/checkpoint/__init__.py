"""Writes checkpoints atomically in the background, at an interval that is derived from their
cost.
"""

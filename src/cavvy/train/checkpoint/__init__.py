"""Checkpoints: written beside the computation, whole or not at all, at an interval that follows
from what they cost.
"""

"""Checkpoints: written in the background, complete or not at all, at an interval that follows from
their cost.
"""

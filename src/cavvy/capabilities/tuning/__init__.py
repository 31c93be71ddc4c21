"""Determines why a training script is slow, the cost of each cause, and how to fix it. The package
measures windows of steps in the running script.
"""

"""Finds the causes that slow a training script down, with their costs and remedies, by measuring
windows of steps in the running script.
"""

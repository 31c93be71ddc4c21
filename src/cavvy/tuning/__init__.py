"""Finds out why a training script is slow, what each cause costs, and how to fix it. For this, it
measures windows of steps in the running script.
"""

"""Finds what slows a training script down, in dollars, and what helps: measured in the script
itself, in windows of steps.
"""

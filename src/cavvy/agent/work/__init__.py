"""The work on a node: its folder, its processes and their limits, its container, and its
measurements.
"""

"""Runs the work on a node: prepares its folder, starts its processes or container, enforces its
limits, and measures its use of resources.
"""

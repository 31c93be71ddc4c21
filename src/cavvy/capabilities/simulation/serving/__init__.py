"""Replays recorded requests against a simulated service, and compares the production autoscaler
with the rules of other systems.
"""

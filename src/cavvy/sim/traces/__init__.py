"""Simulate policies, without a control plane, on recorded availability and prices: readers,
drivers, offline optima and plots.
"""

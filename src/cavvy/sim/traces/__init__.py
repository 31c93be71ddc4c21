"""Simulate policies on recorded availability and prices, without a control plane. The package reads
traces, runs jobs, computes offline optima and draws plots.
"""

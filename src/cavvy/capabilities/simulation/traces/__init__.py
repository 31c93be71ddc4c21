"""Simulates policies on recorded availability and prices, without a control plane. The package
reads traces, runs jobs, computes the best possible results, and draws plots.
"""

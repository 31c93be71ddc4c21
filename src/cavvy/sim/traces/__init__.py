"""Policies alone over recorded availability and prices: readers, drivers, offline optima,
figures.
"""

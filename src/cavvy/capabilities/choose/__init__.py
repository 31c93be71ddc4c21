"""Choosing places: compares accelerators and prices, renting with owning, and clouds with own
machines, the edge and serverless, and draws the catalog.
"""

"""Computes the cost of jobs, the cost that the jobs would have had on other offers, and how the
jobs' time was spent. The module does no I/O.
"""

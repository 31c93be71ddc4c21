"""Plan where tasks run: rank placements by price and time, estimate time, memory and risk, and
decide between spot and on-demand. No I/O.
"""

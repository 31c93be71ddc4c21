"""Plans where tasks run: ranks placements by price and time, estimates time, memory and risk, and
chooses between spot and on-demand. No I/O.
"""

"""Metering, prices on other offers, and how time was spent. No I/O."""

"""Metering, prices on other offers, and where the time went; pure."""

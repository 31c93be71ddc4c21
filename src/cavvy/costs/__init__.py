"""Metering, prices elsewhere and where the time went; pure."""

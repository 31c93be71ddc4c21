"""Metering, budgets and where the time went; pure."""

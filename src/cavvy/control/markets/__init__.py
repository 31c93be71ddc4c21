"""Observations of markets, and the decisions about jobs that use them."""

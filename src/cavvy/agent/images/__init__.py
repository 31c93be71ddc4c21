"""Fetches or builds the work's container image, and checks it, before the work runs."""

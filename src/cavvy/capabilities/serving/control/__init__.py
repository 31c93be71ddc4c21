"""Reconciles services, and handles users' requests about services."""

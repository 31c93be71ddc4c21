"""Reconcilers: observe, decide, act; the clock and the worklist."""

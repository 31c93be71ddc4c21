"""Checks the node before the work starts, if the task requires a check."""

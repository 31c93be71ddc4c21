"""Checks the node before its work starts, if the task requires a check."""

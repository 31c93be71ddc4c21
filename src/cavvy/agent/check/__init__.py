"""Checks the node before its work starts, if the task asks for it."""

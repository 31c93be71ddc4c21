"""Checks dstack's configurations by the rules of dstack, and translates them into tasks."""

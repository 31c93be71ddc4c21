"""dstack: the rules of its configurations, and their translation."""

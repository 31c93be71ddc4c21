"""dstack: the rules of its configurations, and what they mean here."""

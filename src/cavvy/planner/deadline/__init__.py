"""Deadlines: one policy, what it is told of a job, and what its decisions mean in offers. Pure."""

"""Deadlines: one policy, its inputs for a job, and its decisions as offers. No I/O."""

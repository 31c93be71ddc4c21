"""Computes the cost of jobs, the cost of the same jobs on other offers, and how the jobs' time was
spent. The module does no I/O."""

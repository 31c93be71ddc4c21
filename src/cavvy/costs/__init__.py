"""Computes the charges of jobs, their costs on other offers, and how their time was spent. No
I/O."""

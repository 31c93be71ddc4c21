"""Decides the order of the queue, and which part of a shared host each gang gets. Does no I/O."""

"""Decides the order of the queue, and which part of a shared host each gang gets. The module does
no I/O."""

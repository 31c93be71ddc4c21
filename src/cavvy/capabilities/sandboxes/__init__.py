"""Sandboxes: places in which agents run untrusted code."""

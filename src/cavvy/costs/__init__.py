"""Computes what jobs cost, what they would have cost on other offers, and how their time was spent.
Does no I/O."""

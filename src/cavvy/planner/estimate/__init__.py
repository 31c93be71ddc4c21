"""Estimate the memory and time of a training step on a device before renting it. No I/O."""

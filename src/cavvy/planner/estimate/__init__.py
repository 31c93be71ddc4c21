"""Estimates of the memory and time of a training step on a device, before one is rented; pure."""

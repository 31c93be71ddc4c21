"""Estimates the memory and the time of a training step on a device before the device is rented. No
I/O.
"""

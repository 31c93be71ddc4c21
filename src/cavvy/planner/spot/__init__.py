"""Deadline policies for work that may run on spot: what to do now and when to decide again. No I/O.

The same objects decide in production, in the trace simulator and in forecasts.
"""

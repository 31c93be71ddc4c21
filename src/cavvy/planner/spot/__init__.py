"""Deadline policies for work that may run on spot. A policy decides what to do now and when it must
be asked again. No I/O.

Production, the trace simulator and forecasts use the same policies.
"""

"""Deadline policies for work that may run on spot. A policy decides what the job does now, and when
the policy must decide again. No I/O.

Production, the trace simulator and forecasts use the same policies.
"""

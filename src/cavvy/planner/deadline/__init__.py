"""The deadline policy, its inputs for a job, and the offers that follow from its decisions. No
I/O.
"""

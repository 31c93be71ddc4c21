"""The deadline policy, the inputs that it needs for a job, and the offers that it recommends. No
I/O.
"""

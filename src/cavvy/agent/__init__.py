"""The process on each node: it claims, runs, reports, checkpoints and stops a task; standard
library only.
"""

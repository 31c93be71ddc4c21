"""The agent: the process on each node that claims, runs, reports on, checkpoints and stops a task.
It uses only the standard library.
"""

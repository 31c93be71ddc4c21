"""The agent: the process on each node that claims, runs, reports on, checkpoints and stops a task.
The agent uses only Python's standard library.
"""

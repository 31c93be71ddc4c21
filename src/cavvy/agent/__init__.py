"""The agent: the process on each node that claims a task from the control plane, runs it, reports
on it, uploads its checkpoints and stops it. In this package, "the work" means the processes that
run the task on this node. The agent uses only Python's standard library.
"""

"""What the agent runs on a node: the folder, the processes and their limits, the container, the
measurements.
"""

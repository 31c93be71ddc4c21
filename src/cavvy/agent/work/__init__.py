"""What the agent does with a node: the folder, the processes and their bounds, the container,
what is measured.
"""

"""A line to one node of a job through the control plane: shells, connections and files, many at
once.
"""

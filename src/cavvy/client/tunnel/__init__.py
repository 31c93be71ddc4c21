"""A tunnel through the control plane to one node of a job; it carries many shells, connections and
file operations at once.
"""

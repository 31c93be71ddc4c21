"""A tunnel to one node of a job through the control plane, with many shells, connections and file
operations at once.
"""

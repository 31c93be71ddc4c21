"""A tunnel through the control plane to one node of a job. Many shells, connections and file
operations can share one tunnel.
"""

"""Nodes of pools for other clusters: Kubernetes and Slurm order and release them."""

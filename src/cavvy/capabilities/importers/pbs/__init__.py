"""Batch scripts of PBS: `batch_script` makes a task of the lines of #PBS. On a node, the script
finds the programs of `capabilities/importers/slurm/node_tools.py`.
"""

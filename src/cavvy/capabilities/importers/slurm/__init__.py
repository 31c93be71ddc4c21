"""Batch scripts of Slurm: `directives` reads the lines of #SBATCH, `batch_script` makes a task of
them, and `node_tools` is the Slurm that the script finds on a node.
"""

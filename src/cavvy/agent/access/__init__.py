"""What users run on this node beside the task: commands, shells, connections, file access."""

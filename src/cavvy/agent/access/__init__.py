"""What users do on this node beside the work: commands, shells, connections, files."""

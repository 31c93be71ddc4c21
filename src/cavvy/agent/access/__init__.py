"""Gives users access to this node: commands, shells, connections and files."""

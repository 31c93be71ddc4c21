"""Lets users reach this node: runs their commands and shells, and forwards connections and
files."""

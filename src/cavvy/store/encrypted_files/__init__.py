"""Encrypts the files that a server stores: working folders, logs and checkpoints."""

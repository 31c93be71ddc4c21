"""Connects commands to the server, to nodes of jobs, and to the configured providers."""

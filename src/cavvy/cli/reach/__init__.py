"""What lies beyond this terminal: the server, its jobs and their logs, nodes, and the configured
providers.
"""

"""What places with a batch system share: a session on the login node, the shared folder, the
agents' mail; no provider.
"""

"""The parts that providers of batch systems share: a session on the login node, the shared folder,
the agents' mail.
"""

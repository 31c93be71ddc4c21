"""The code that the providers of batch systems share: the session on the login node, the shared
folder, and the relay of the agents' requests.
"""

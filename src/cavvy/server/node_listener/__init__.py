"""The listener for nodes outside this machine. The listener uses TLS with the server's own
certificate, and serves files that are named by their hash.
"""

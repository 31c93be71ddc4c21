"""The listener for nodes outside this machine: TLS with the server's own certificate, and files by
hash.
"""

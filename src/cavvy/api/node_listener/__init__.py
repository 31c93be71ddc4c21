"""How nodes that come from anywhere reach this server: TLS by a certificate of its own, and
files by their hash.
"""

"""How nodes from outside reach this server: TLS with its own certificate, and files by hash."""

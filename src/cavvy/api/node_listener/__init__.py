"""How outside nodes reach this server: TLS with its own certificate, and files by hash."""

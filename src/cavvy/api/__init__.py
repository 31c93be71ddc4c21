"""The HTTP API: its routes, their schemas, authentication, and the process of the server."""

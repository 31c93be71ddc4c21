"""The HTTP API: its routes, their schemas and authentication. The process is in `server`."""

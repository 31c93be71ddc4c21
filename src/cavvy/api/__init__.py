"""The HTTP API: routes, schemas, authentication, and the server process."""

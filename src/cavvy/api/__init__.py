"""The HTTP API: routes, schemas, authentication, and the life of the server process."""

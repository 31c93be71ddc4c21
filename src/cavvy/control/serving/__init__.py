"""Services: their reconciler, the handling of users' requests about them, and their dependencies on
the server."""

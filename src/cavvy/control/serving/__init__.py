"""Services: their reconciler, users' requests about them, and what they need of the server."""

"""Images of the work: getting, building and checking them before anything runs."""

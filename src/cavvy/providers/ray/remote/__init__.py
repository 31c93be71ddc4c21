"""Programs that are copied to a Ray cluster and run there; they import nothing of Cavvy."""

"""Programs that run in pods; they import nothing of Cavvy."""

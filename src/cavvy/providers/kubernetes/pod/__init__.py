"""Programs that run in pods, and import nothing from Cavvy."""

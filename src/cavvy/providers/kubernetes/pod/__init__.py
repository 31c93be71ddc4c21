"""Programs that run in pods. These programs import nothing from Cavvy."""

"""Programs that run in pods. They import nothing from Cavvy."""

"""Programs that are copied to a Ray cluster and run there. They import nothing from Cavvy."""

"""Programs that are copied to a Ray cluster and run there. The programs import nothing from
Cavvy."""

"""What people and programs see of it all: tables, JSON, a live screen, errors; asks nobody."""

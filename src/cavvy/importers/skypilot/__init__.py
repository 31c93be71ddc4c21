"""SkyPilot: the rules of its task files, and their translation."""

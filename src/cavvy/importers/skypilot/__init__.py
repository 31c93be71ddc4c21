"""SkyPilot: the rules of its task files, and what they mean here."""

"""Check SkyPilot's task files by the rules of SkyPilot, and translate them."""

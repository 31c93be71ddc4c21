"""Checks SkyPilot's task files by the rules of SkyPilot, and translates them into tasks."""

"""Pins images to digests, and verifies who signed them, before their jobs are stored."""

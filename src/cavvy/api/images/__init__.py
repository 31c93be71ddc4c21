"""Pins images to digests and verifies their signatures, before jobs that use them are stored."""

"""Stores rows, blobs, logs and the catalog snapshot."""

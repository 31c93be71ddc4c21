"""Rows, blobs, logs and the catalog snapshot: everything that is remembered."""

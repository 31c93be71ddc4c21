"""Stores database rows, blobs (files named by their hash), logs, and the snapshot of the price
catalog."""

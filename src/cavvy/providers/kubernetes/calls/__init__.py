"""Speaks to API servers: who asks, requests and watches, streams."""

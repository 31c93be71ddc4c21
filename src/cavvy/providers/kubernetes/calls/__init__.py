"""Calls API servers: credentials, requests, watches and streams."""

"""Calls to API servers: credentials, requests, watches and streams."""

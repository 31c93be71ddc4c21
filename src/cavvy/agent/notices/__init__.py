"""Detects that the provider reclaims the node, and notifies the task."""

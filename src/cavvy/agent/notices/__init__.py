"""Detects that the provider will reclaim the node, and notifies the task."""

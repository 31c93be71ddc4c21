"""The routes of services."""

"""The job formats: one module for each managed service."""

"""Job formats of managed services: `cavvy export` writes a task as a service's own request.

Each package here is one format: its `request` builds the request from values, for use by a provider
as well, and its `export` fills the request from a task.
"""

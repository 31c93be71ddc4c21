"""Job formats of managed services: `cavvy export` writes a task as a request to the service.

Each module in `services` is one format. It reads the values for a request from a task, and builds
the request from these values. Providers build their requests with the same functions.
"""

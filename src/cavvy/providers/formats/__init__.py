"""Job formats of managed services: `cavvy export` writes a task as a request to the service.

Each package in this folder is one format. The module `export` of a format reads the values for a
request from a task, and the module `request` builds the request from these values. Providers also
use `request`.
"""

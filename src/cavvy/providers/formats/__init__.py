"""Job formats of managed services: `cavvy export` writes a task as a request to the service.

Each package in this folder is one format. The module `export` of a format turns a task into values,
and its module `request` builds the request from values. Providers also use `request`.
"""

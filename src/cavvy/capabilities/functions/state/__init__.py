"""Dicts and queues of projects, which functions and their callers share: `cavvy.Dict` and
`cavvy.Queue`. The server keeps bytes, and loads none of them.
"""

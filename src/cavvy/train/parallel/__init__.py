"""Distributes a model over ranks: replicas, shards, tensor parallel, pipeline parallel, and
combinations of them.
"""

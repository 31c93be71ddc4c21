"""Distributes a model over ranks as replicas, shards, tensor parallel, pipeline parallel, or a
combination of these.
"""

"""Models over ranks: replicas, shards, tensor parallel, pipeline parallel, and their
combinations.
"""

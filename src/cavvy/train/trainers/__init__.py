"""Adds Cavvy's resuming, data order and handling of notices to the trainers of Hugging Face and
Lightning.
"""

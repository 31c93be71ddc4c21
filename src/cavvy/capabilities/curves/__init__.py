"""Curves of what programs report step by step."""

"""Transfers the work's inputs and outputs from and to storages, and provides its volumes."""

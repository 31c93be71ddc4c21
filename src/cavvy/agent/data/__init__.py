"""Data of the work: inputs and outputs on storages, and volumes."""

"""Scenarios: the production control plane and policies, a fake cloud and virtual time."""

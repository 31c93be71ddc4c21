"""Simulations of the production control plane and policies, on a fake cloud and virtual time."""

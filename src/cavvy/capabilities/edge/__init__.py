"""Devices at the edge, the models that they serve, and the rollouts that bring these to them."""

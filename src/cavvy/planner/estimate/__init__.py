"""How much memory and time a training step takes on a device that nobody has rented yet; pure."""

"""A run's current rates and dollars, and the trackers that receive them."""

"""A run's current rates and costs, and the experiment trackers that receive them."""

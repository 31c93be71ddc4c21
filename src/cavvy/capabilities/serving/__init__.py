"""Services: programs on replicas that answer requests."""

"""What is decided about services: pure functions of what was observed."""

"""What runs on the node of a function: the broker of its calls, and the workers."""

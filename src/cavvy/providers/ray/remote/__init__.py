"""What is brought to a Ray cluster and runs there; it imports nothing of ours."""

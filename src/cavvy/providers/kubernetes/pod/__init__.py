"""What is brought to pods and runs there; it imports nothing of ours."""

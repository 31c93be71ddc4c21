"""What is known of markets, and the decisions about jobs that rest on it."""

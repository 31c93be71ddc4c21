"""Market observations, and the decisions about jobs that are based on these observations."""

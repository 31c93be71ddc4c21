"""Market observations, and the decisions about jobs that use them."""

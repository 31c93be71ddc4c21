"""What brokers count of their calls, for the pages of apps."""

"""A task before it runs: read, given rates, offered places and prices, submitted."""

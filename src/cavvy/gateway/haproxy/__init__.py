"""The second data plane: HAProxy takes the requests, and the gateway those that must wait."""

"""The second data plane: HAProxy handles the requests, and the gateway handles those that must
wait."""

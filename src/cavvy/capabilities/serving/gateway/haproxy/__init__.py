"""The second data plane: HAProxy passes requests to replicas, and the gateway handles requests that
must wait."""

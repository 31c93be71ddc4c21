"""Look-ups over a snapshot of accelerators, instance types and offers; pure."""

"""Commands of `cavvy pool` for pools whose nodes belong to another cluster."""

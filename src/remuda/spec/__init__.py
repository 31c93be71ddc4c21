"""The user's files: parse, check, explain."""

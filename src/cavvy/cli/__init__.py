"""Commands; what needs a server goes through the client."""

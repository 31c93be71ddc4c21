"""The commands of the CLI. Those that need a server use the client."""

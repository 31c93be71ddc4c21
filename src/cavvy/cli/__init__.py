"""The commands of the CLI. Commands that need a server use `cavvy.client`."""

"""Python functions that run on any node: `cavvy.App`."""

"""The program that starts the agent in a container. It imports nothing from Cavvy."""

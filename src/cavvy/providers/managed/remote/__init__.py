"""The program that starts the agent in a container. The program imports nothing from Cavvy."""

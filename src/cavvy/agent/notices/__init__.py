"""How the agent learns that its node is taken back, and how it tells the task."""

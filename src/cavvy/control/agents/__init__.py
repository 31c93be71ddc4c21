"""The services that grant work to agents, handle their reports, and send them orders."""

"""The services that grant work to agents, receive their reports, and send them orders."""

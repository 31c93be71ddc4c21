"""The web console: pages about jobs, services, machines and costs, made with the Python client."""

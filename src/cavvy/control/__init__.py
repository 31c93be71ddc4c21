"""The control plane: reconcilers that bring jobs, gangs and machines to their wanted state, and the
services that handle the requests of users and agents."""

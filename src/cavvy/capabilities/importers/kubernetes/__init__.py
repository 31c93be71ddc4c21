"""Translates a Kubernetes Deployment with its Service, claims and autoscaler to a service."""

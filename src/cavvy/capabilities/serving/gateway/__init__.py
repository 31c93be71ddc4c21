"""The data plane of serving: it receives requests for services and passes them to replicas."""

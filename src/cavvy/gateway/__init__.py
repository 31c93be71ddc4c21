"""The data plane of serving: it takes requests for services and passes them to replicas."""

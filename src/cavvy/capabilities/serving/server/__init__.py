"""The gateway's process and the probes of replicas, for the control plane."""

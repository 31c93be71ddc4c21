"""Gangs on hosts that a steward looks after, however the control plane speaks to it."""

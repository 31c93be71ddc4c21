"""Gangs on hosts that a supervisor looks after, however the control plane speaks to it."""

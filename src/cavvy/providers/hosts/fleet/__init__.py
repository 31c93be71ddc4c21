"""Runs gangs on hosts that have a supervisor. The connection to a host can be of any kind."""

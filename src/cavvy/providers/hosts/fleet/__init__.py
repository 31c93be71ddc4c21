"""Runs gangs on hosts that have a supervisor. The control plane may reach the hosts in any way,
such as SSH."""

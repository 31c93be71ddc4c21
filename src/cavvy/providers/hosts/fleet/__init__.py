"""Runs gangs on hosts that have a supervisor. The control plane may reach the hosts by any
protocol, such as SSH.
"""

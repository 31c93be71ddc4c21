"""Runs gangs on hosts with a supervisor, regardless of how the control plane connects to the
host.
"""

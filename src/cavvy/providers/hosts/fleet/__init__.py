"""Gangs on hosts with a supervisor, for every kind of link to it."""

"""Decides how many replicas a service needs and in which markets they run. No I/O.

`decide.decide` is the rule. The rule stores nothing: each decision receives the state of a service
and returns the new state. Therefore a program can restart if it stores the state of each service.
"""

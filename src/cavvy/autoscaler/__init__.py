"""Decides how many replicas a service needs and in which markets they run. No I/O.

`decide.decide` is the rule. The rule stores nothing: the state of a service is a value that each
decision takes and returns. Therefore a program that stores the state can end and start again.
"""

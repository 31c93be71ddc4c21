"""Decides how many replicas a service needs and in which markets they run. No I/O.

`decide.decide` is the rule. It remembers nothing: the state of a service is a value that each
decision takes and returns, so a program that keeps this value can end and start again.
"""

"""Templates of `cavvy init`, a folder each: a task file, a program and, if it needs packages, their
names.
"""

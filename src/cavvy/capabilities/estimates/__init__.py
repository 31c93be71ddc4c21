"""Estimates of training runs: traces of scripts, measured kernels and runs for a minute."""

MODULE = "-m "  # the beginning of the name of a script that is a module instead of a file

"""Runs the jobs of CI services as jobs of Cavvy; `cavvy runner` has the commands."""

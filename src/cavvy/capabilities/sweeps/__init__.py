"""Sweeps that learn: values that results choose, and jobs that are stopped early."""

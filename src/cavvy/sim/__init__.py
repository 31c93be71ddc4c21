"""Production control and policies, a fake cloud and a clock that jumps."""

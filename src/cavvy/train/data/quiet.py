"""Imports Grain without its warning that JAX is missing."""

from absl import logging as absl

_before = absl.get_verbosity()
absl.set_verbosity(absl.ERROR)
try:
    import grain
    from grain.experimental import index_shuffle
finally:
    absl.set_verbosity(_before)

__all__ = ["grain", "index_shuffle"]

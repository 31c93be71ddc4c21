"""Imports Grain at its first use, without its warning that JAX is missing. Data in memory needs no
Grain, except very long data. Training on data in memory therefore works without Grain.
"""

from functools import cache
from typing import Any


@cache
def load_grain() -> Any:
    """The package `grain`, with `grain.experimental`. Raises ModuleNotFoundError."""
    from absl import logging as absl

    before = absl.get_verbosity()
    absl.set_verbosity(absl.ERROR)
    try:
        import grain
        import grain.experimental
    finally:
        absl.set_verbosity(before)
    return grain

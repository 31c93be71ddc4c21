"""Imports Grain when it is first used, without Grain's warning that JAX is missing. Training on
data in memory works without Grain, unless the data has very many samples.
"""

from functools import cache
from typing import Any


@cache
def load_grain() -> Any:
    """Return the package `grain`, with `grain.experimental`. Raises ModuleNotFoundError."""
    from absl import logging as absl

    before = absl.get_verbosity()
    absl.set_verbosity(absl.ERROR)
    try:
        import grain
        import grain.experimental
    finally:
        absl.set_verbosity(before)
    return grain

"""How the columns of stored curves are named: those of other processes than the first of a node,
and those with NaN and infinite values, have a suffix. Names that programs report have no control
characters.
"""

from functools import lru_cache
from typing import NamedTuple

_PROCESS, _ODD = "\x1f", "\x1e"
ODD_NAMES = {1.0: "nan", 2.0: "inf", 3.0: "-inf"}  # how agents send values that are not finite


class CurveKey(NamedTuple):
    """Whose column it is."""

    name: str
    process: int = 0  # of the node
    is_odd: bool = False  # its values are 1 for NaN, 2 for infinity and 3 for minus infinity


def write_key(key: CurveKey) -> str:
    process = f"{_PROCESS}{key.process}" if key.process else ""
    return f"{key.name}{process}{_ODD if key.is_odd else ''}"


@lru_cache(maxsize=4096)
def read_key(text: str) -> CurveKey:
    rest, odd, _ = text.partition(_ODD)
    name, _, process = rest.partition(_PROCESS)
    return CurveKey(name, int(process or 0), bool(odd))

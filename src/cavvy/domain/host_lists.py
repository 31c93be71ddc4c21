"""Parses host lists in the notation of batch systems: "gpu[01-03,7],login" means gpu01, gpu02,
gpu03, gpu7 and login.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import product

_PARTS = re.compile(r"(?:[^,\[]|\[[^\]]*\])+")
_PIECES = re.compile(r"\[([^\]]*)\]|([^\[]+)")


def expand(text: str) -> Sequence[str]:
    """Return the host names, in the order of the list. Raises ValueError if a range is not of
    numbers."""
    return [host for part in _PARTS.findall(text) for host in _expand(part)]


def _expand(part: str) -> Iterator[str]:
    choices = [
        list(_numbers(inside)) if inside else [plain] for inside, plain in _PIECES.findall(part)
    ]
    return ("".join(pieces) for pieces in product(*choices))


def _numbers(text: str) -> Iterator[str]:
    for item in text.split(","):
        first, dash, last = item.partition("-")
        if not dash:
            yield first
            continue
        yield from (str(number).zfill(len(first)) for number in range(int(first), int(last) + 1))

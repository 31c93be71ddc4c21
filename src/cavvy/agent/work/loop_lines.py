"""Reads again, with one pattern, lines that a loop prints: they differ in their numbers only.

`printed_values` finds out what such a line has, and makes its pattern. A loop that prints 300 lines
a second then costs the agent a third of the time.
"""

from __future__ import annotations

import re

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# Numbers whose ends are clear; a line with others has no pattern.
_WHOLE = r"(\d{1,15})"
_BROKEN = r"([-+]?\d{1,20}(?:\.\d{1,20}(?:[eE][-+]?\d{1,3})?|[eE][-+]?\d{1,3}))"
_WHOLE_NUMBER, _BROKEN_NUMBER = re.compile(_WHOLE), re.compile(_BROKEN)
_AFTER = re.compile(r"[\s;|)\]}'\"]|[,:](?!\d)")  # what may follow a number


class LoopLine:
    """A line of which the numbers alone are unknown: its pattern, which numbers count steps, and
    which have names that people plot."""

    def __init__(
        self,
        pattern: re.Pattern[bytes],
        counters: Mapping[str, int],
        values: Mapping[str, int],
        plotted: frozenset[str],
    ) -> None:
        self._match = pattern.fullmatch
        self._counters, self._values = [*counters.items()], [*values.items()]
        self.plotted = plotted

    def read(self, line: bytes) -> tuple[dict[str, float], dict[str, float]] | None:
        """Return the counters and the values of a line, or None if it is another one."""
        found = self._match(line)
        if found is None:
            return None
        numbers = found.groups()
        return (
            {name: float(numbers[at]) for name, at in self._counters},
            {name: float(numbers[at]) for name, at in self._values},
        )


def make_pattern(parts: Sequence[str], stamp: str = "") -> re.Pattern[bytes] | None:
    """Return the pattern of a line, of which every second part is a number, and before which a
    pattern without groups stands; None if it has numbers whose ends are not clear."""
    pieces = [stamp]
    for number, part in enumerate(parts):
        if number % 2 == 0:
            is_last = number == len(parts) - 1
            if not part.isascii() or (number and (part or not is_last) and not _AFTER.match(part)):
                return None
            pieces.append(re.escape(part))
        elif _WHOLE_NUMBER.fullmatch(part):
            pieces.append(_WHOLE)
        elif _BROKEN_NUMBER.fullmatch(part):
            pieces.append(_BROKEN)
        else:
            return None
    return re.compile("".join(pieces).encode())

"""Records when the bytes of a log arrived: a file of pairs beside the log, at most two per second.

A pair holds an offset and a time. Bytes between two pairs arrived less than half a second after the
time of the first pair.
"""

import os
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from struct import Struct

_PAIR = Struct("<QQ")  # offset in bytes, time in microseconds since 1970
_APART_S = 0.5  # minimum seconds between two pairs


def note_arrival(path: Path, offset: int, now_s: float) -> None:
    """Append a pair. On a full disk the pair is lost, which makes the times less precise."""
    with suppress(OSError):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(file, _PAIR.pack(offset, round(now_s * 1e6)))
        finally:
            os.close(file)


def is_due(last_s: float, now_s: float) -> bool:
    """Whether the time differs enough from that of the last pair."""
    return now_s - last_s >= _APART_S


@dataclass(frozen=True, slots=True, kw_only=True)
class LogTimes:
    """When the bytes of a log arrived: the bytes from `offsets[i]` on arrived at `times[i]`, in
    seconds since 1970.
    """

    offsets: Sequence[int] = field(default_factory=list)
    times: Sequence[float] = field(default_factory=list)

    def since(self, start_s: float) -> int | None:
        """The offset of the first byte that arrived at that time or later, to the second."""
        found = next((i for i, at in enumerate(self.times) if at >= start_s), None)
        return None if found is None else self.offsets[found]

    def between(self, start: int, end: int) -> list[tuple[int, float]]:
        """The pairs that cover these bytes."""
        first = max(0, bisect_right(self.offsets, start) - 1)
        pairs = zip(self.offsets[first:], self.times[first:], strict=True)
        return [(offset, at) for offset, at in pairs if offset < end]


def read_times(path: Path) -> LogTimes:
    """The recorded times; none if the log was stored without them."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return LogTimes()
    pairs = list(_PAIR.iter_unpack(data[: len(data) // _PAIR.size * _PAIR.size]))
    return LogTimes(offsets=[pair[0] for pair in pairs], times=[pair[1] / 1e6 for pair in pairs])

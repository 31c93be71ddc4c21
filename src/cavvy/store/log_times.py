"""Records when the bytes of a log arrived.

A file next to the log contains at most two pairs per second. A pair consists of an offset and a
time. The bytes of the log between the offsets of two successive pairs arrived at the time of the
first pair, or up to half a second later.
"""

import os
import struct
from bisect import bisect_right
from contextlib import suppress
from pathlib import Path

from cavvy.domain.values import Struct

_PAIR = struct.Struct("<QQ")  # offset in bytes, time in microseconds since 1970
_APART_S = 0.5  # minimum seconds between two pairs


def note_arrival(path: Path, offset: int, now_s: float) -> None:
    """Append a pair. If the disk is full, the pair is not stored,
    which only makes the times less precise."""
    with suppress(OSError):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(file, _PAIR.pack(offset, round(now_s * 1e6)))
        finally:
            os.close(file)


def is_due(last_s: float, now_s: float) -> bool:
    """Return whether enough time has passed since the last stored pair to store another pair."""
    return now_s - last_s >= _APART_S


class LogTimes(Struct, frozen=True, kw_only=True):
    """The recorded pairs of a log. The list is empty if the log was stored without times."""

    path: Path

    def since(self, start_s: float) -> int | None:
        """Return the offset of the first byte that arrived at the given time or later, accurate to
        half a second.
        """
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return None
        pairs = _PAIR.iter_unpack(data[: len(data) // _PAIR.size * _PAIR.size])
        return next((offset for offset, micros in pairs if micros / 1e6 >= start_s), None)

    def between(self, start: int, end: int, limit: int) -> list[tuple[int, float]]:
        """Return the first `limit` pairs for the bytes from `start` to `end`. Each pair is an
        offset in the log and the time in seconds since 1970. The method reads only the returned
        pairs and the pairs that a binary search needs.
        """
        try:
            file = self.path.open("rb", buffering=0)
        except FileNotFoundError:
            return []
        with file:
            number = file.fileno()

            def read(first: int, count: int) -> list[tuple[int, int]]:
                data = os.pread(number, count * _PAIR.size, first * _PAIR.size)
                return list(_PAIR.iter_unpack(data[: len(data) // _PAIR.size * _PAIR.size]))

            known = range(os.fstat(number).st_size // _PAIR.size)
            first = bisect_right(known, start, key=lambda i: read(i, 1)[0][0])
            pairs = read(max(0, first - 1), limit)
        return [(offset, micros / 1e6) for offset, micros in pairs if offset < end]

"""What files tell that training programs write, such as TensorBoard's event files, and how such a
file is read while it grows.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

PIECE_BYTES = 256 << 10  # that are read at a time


class RunEvent:
    """What a record of a file tells. Its time is in seconds since 1970."""

    __slots__ = ("at", "examples", "params", "step", "values")

    def __init__(self) -> None:
        self.at, self.step = 0.0, 0.0
        self.values: dict[str, float] = {}
        self.params: dict[str, str] = {}
        self.examples: list[tuple[str, str, bytes]] = []  # names, kinds and bytes (`examples.py`)


class RunFile:
    """A file of records that grows. Each format has its own records (`_next`) and messages
    (`_parse`).
    """

    def __init__(self, folder: str, fd: int) -> None:
        self.folder, self._fd = folder, fd
        self._offset = 0  # from which more is read
        self._data, self._at = b"", 0  # what was read, and what of it is taken
        self._broken = False

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def read(self, most: int) -> Iterator[RunEvent]:
        """Yield up to `most` new events, empty ones for what is left out."""
        while most > 0 and not self._broken:
            record = self._next()
            if record is None:
                return
            most -= 1
            yield self._parse(record)

    def _next(self) -> bytes | None:
        """Return the next complete record, b"" for one that is left out, or None if there is none
        yet."""
        raise NotImplementedError

    def _parse(self, record: bytes) -> RunEvent:
        raise NotImplementedError

    def _fill(self, size: int) -> bool:
        """Read until at least `size` bytes are there; return whether they are."""
        rest = len(self._data) - self._at
        if rest >= size:
            return True
        try:
            data = os.pread(self._fd, max(PIECE_BYTES, size - rest), self._offset)
        except OSError:
            self._break()
            return False
        self._offset += len(data)
        self._data, self._at = self._data[self._at :] + data, 0
        return len(self._data) >= size

    def _place(self) -> int:
        """Return where in the file begins what is not taken yet."""
        return self._offset - len(self._data) + self._at

    def _skip(self, size: int) -> None:
        self._at += size
        if self._at > len(self._data):  # a record that is passed over
            self._offset, self._data, self._at = self._place(), b"", 0

    def _break(self) -> None:
        """Read no more: what follows cannot be found."""
        self._broken = True
        self.close()

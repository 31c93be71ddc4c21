"""What files tell that training programs write, such as TensorBoard's event files, and how such a
file is read while it grows.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PIECE_BYTES = 256 << 10  # that are read at a time


class RunEvent:
    """What a record of a file tells. Its time is in seconds since 1970."""

    __slots__ = ("at", "examples", "params", "step", "values")

    def __init__(self) -> None:
        self.at, self.step = 0.0, 0.0
        self.values: dict[str, float] = {}
        self.params: dict[str, str] = {}
        self.examples: list[tuple[str, str, bytes]] = []  # names, kinds and bytes (`examples.py`)


class GrowingFile:
    """The bytes of a file that grows: what of `data` begins at `at` is not taken yet."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._offset = 0  # from which more is read
        self.data, self.at = b"", 0
        self.is_broken = False

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def fill(self, size: int) -> bool:
        """Read until at least `size` bytes are there; return whether they are."""
        rest = len(self.data) - self.at
        if rest >= size:
            return True
        try:
            data = os.pread(self._fd, max(PIECE_BYTES, size - rest), self._offset)
        except OSError:
            self.give_up()
            return False
        self._offset += len(data)
        self.data, self.at = self.data[self.at :] + data, 0
        return len(self.data) >= size

    def place(self) -> int:
        """Return where in the file begins what is not taken yet."""
        return self._offset - len(self.data) + self.at

    def size(self) -> int:
        """Return the size that the file has by now."""
        return os.fstat(self._fd).st_size

    def skip(self, size: int) -> None:
        self.at += size
        if self.at > len(self.data):  # a record that is passed over
            self._offset, self.data, self.at = self.place(), b"", 0

    def give_up(self) -> None:
        """Read no more: what follows cannot be found."""
        self.is_broken = True
        self.close()


class RunFile:
    """A file of records that grows. `take` returns the next complete record, b"" for one that is
    left out, or None if there is none yet; `parse` returns what a record tells.
    """

    def __init__(
        self,
        folder: str,
        file: GrowingFile,
        take: Callable[[], bytes | None],
        parse: Callable[[bytes], RunEvent],
    ) -> None:
        self.folder = folder
        self._file, self._take, self._parse = file, take, parse

    def close(self) -> None:
        self._file.close()

    def read(self, most: int) -> Iterator[RunEvent]:
        """Yield up to `most` new events, empty ones for what is left out."""
        while most > 0 and not self._file.is_broken:
            record = self._take()
            if record is None:
                return
            most -= 1
            yield self._parse(record)

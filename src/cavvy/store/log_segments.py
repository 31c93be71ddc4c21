"""The files of a log: each file contains the bytes from one offset on, either plain or
encrypted.
"""

import os
import struct
from bisect import bisect_right
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from cavvy.domain.values import Struct
from cavvy.store.base import StoreUnusable
from cavvy.store.encrypted_files.blocks import (
    LOGS,
    EncryptedFile,
    FileKey,
    create_encrypted,
    open_encrypted,
)
from cavvy.store.encrypted_files.streams import PlainFile

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


SEALED = ".sealed"  # the end of the name of an encrypted file


class LogSegment(Struct):
    """A file of a log, the offset of its first byte, and the number of its bytes."""

    base: Path  # the name of the log's first plain file, from which all names are made
    start: int
    size: int = 0
    sealed: bool = False

    @property
    def end(self) -> int:
        return self.start + self.size

    @property
    def path(self) -> Path:
        if self.start == 0 and not self.sealed:
            return self.base
        return self.base.with_name(
            f"{self.base.name}.{self.start:020}{SEALED if self.sealed else ''}"
        )


class SegmentFiles:
    """Reads and writes the files of one project. `current` returns the key for new files, and
    `find` returns the key that the header of a file names. `current` and `find` are None if all
    files are plain.
    """

    def __init__(
        self,
        *,
        encrypts: bool = False,
        current: Callable[[], FileKey] | None = None,
        find: Callable[[bytes], FileKey] | None = None,
    ) -> None:
        self.encrypts = encrypts
        self._current, self._find = current, find

    def create(self, segment: LogSegment) -> None:
        """Create the file without any bytes. Raises OSError, StoreUnusable, StoreFull."""
        key = self._current() if segment.sealed and self._current else None
        flags = os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC
        fd = os.open(segment.path, flags, 0o600)
        try:
            if key is not None:
                create_encrypted(fd, LOGS, key, _bound(segment))
        finally:
            os.close(fd)

    def read(self, segment: LogSegment, at: int, length: int) -> bytes:
        """Return at most `length` bytes from the position `at` in the file. Raises OSError,
        StoreUnusable.
        """
        fd = os.open(segment.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return self._open(fd, segment).read(at, length)
        finally:
            os.close(fd)

    def append(self, segment: LogSegment, data: bytes) -> None:
        """Append all bytes or none. Raises FileNotFoundError, OSError, StoreUnusable."""
        fd = os.open(segment.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            try:
                self._open(fd, segment).append(data)
            except OSError:
                if not segment.sealed:
                    os.ftruncate(fd, segment.size)
                raise
        finally:
            os.close(fd)
        segment.size += len(data)

    def _open(self, fd: int, segment: LogSegment) -> PlainFile | EncryptedFile:
        if not segment.sealed:
            return PlainFile(fd)
        if self._find is None:
            raise StoreUnusable(f"{segment.path} is encrypted, and the server has no keys of files")
        return open_encrypted(fd, LOGS, self._find, _bound(segment))


def find_segment_size(stored: int, *, sealed: bool) -> int:
    """Return the number of bytes of the log in a file of `stored` bytes."""
    return LOGS.size(stored) if sealed else stored


def _bound(segment: LogSegment) -> str:
    return f"logs/{segment.base.parent.name}/{segment.path.name}"

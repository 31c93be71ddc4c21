"""The files of a log: each file contains the bytes from one offset on, either plain or
encrypted."""

import os
from collections.abc import Callable
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

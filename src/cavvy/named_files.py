"""Opens files that users name. A name can lead to a pipe into which no program writes, for which a
plain `open` waits for ever.
"""

import io
import os
import select
import stat
import time
from typing import BinaryIO

WAIT_S = 5.0  # for a program that is to write into a pipe
_PAUSE_MS = 50


class NothingWrites(OSError):
    """Raised for a pipe into which no program writes."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        text = f"it is a pipe, and for {WAIT_S:g} s no program has opened it to write"
        super().__init__(None, text, os.fspath(path))
        self.strerror = text


def open_named(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file to read its bytes. A pipe may be written by a program that starts at the same
    time, as in `cavvy run <(make-task)`. Raises NothingWrites, and OSError as `open` does.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(21, os.strerror(21), os.fspath(path))
        first = _wait_for_writer(descriptor, path) if stat.S_ISFIFO(mode) else b""
        os.set_blocking(descriptor, True)
        if first:
            return io.BufferedReader(_Rest(first, descriptor))
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_named(path: str | os.PathLike[str], most: int | None = None) -> bytes:
    """Return the bytes of a file, at most `most`. Raises what `open_named` raises."""
    with open_named(path) as file:
        return file.read() if most is None else file.read(most)


def read_named_text(path: str | os.PathLike[str], *, errors: str = "strict") -> str:
    """Return the text of a file in UTF-8, with the line ends of any system. Raises what
    `open_named` raises, and UnicodeDecodeError."""
    with io.TextIOWrapper(open_named(path), "utf-8", errors) as file:
        return file.read()


def _wait_for_writer(pipe: int, path: str | os.PathLike[str]) -> bytes:
    """Return the first byte of a pipe, or b"" if it is open for writing, or was until now."""
    until = time.monotonic() + WAIT_S
    watch = select.poll()
    watch.register(pipe, select.POLLIN)
    while not watch.poll(_PAUSE_MS):
        try:
            first = os.read(pipe, 1)
        except BlockingIOError:  # a program may still write
            return b""
        if first:
            return first
        if time.monotonic() > until:
            raise NothingWrites(path)
    return b""


class _Rest(io.RawIOBase):
    """A pipe whose first byte was read already."""

    def __init__(self, first: bytes, pipe: int) -> None:
        self._first, self._pipe = first, pipe

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._pipe

    def readinto(self, into: "memoryview | bytearray") -> int:  # type: ignore[override]  # what io passes
        data = self._first or os.read(self._pipe, len(into))
        self._first = b""
        into[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            os.close(self._pipe)
        super().close()

"""Locks between the servers that share a folder. The locks need a file system whose locks work for
all servers, such as a local disk or NFSv4.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from zlib import crc32

_FILES = 64  # names that share one of these files wait for each other


class FileLocks:
    """Named locks, each a file in a folder. Each holder opens the file separately, so the locks
    also work between threads.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @contextmanager
    def hold(self, name: str) -> Iterator[None]:
        """Hold the lock with this name. The call blocks, so use the lock for short work only."""
        file = self._open(name)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
        finally:
            os.close(file)

    def try_hold(self, name: str) -> FileIO | None:
        """Return the open file of the lock with this name, or None if the lock is held. Closing the
        file releases the lock.
        """
        file = FileIO(self._open(name), "r+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        return file

    def _open(self, name: str) -> int:
        path = self._folder / f"{crc32(name.encode()) % _FILES:02}"
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            return os.open(path, flags, 0o600)
        except FileNotFoundError:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            return os.open(path, flags, 0o600)

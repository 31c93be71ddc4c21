"""Locks between servers: between servers that share a folder, and between servers that share only a
PostgreSQL database.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Protocol
from zlib import crc32

from cavvy.store.base import StoreUnusable
from cavvy.store.drivers import DatabaseDriver, DatabaseSession, make_driver, translating

_FILES = 64  # names that share one of these files wait for each other
_CLASS = 0x43415659  # the first number of our locks; leases use locks with one number


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


class HeldLock(Protocol):
    """A lock that this process holds until `close` is called or the process ends."""

    def close(self) -> None: ...


class NamedLocks(Protocol):
    """Locks between servers. Each lock has a name."""

    def try_hold(self, name: str) -> HeldLock | None:
        """Acquire and return the lock with this name, or return None if the lock is held already.
        Blocks on I/O for a short time.
        """


class DatabaseLocks:
    """Holds each lock with a separate connection, so that PostgreSQL releases the locks of a server
    that was killed.
    """

    def __init__(self, url: str) -> None:
        self._driver = make_driver(url, journal="auto")

    def try_hold(self, name: str) -> "_DatabaseLock | None":
        """See `NamedLocks`. Raises StoreUnusable."""
        number = crc32(name.encode()) - (1 << 31)
        with translating(self._driver):
            session = self._driver.connect()
            row = session.run(f"SELECT pg_try_advisory_lock({_CLASS}, ?)", (number,)).fetchone()
        if row is not None and row[0]:
            return _DatabaseLock(self._driver, session, number)
        session.close()
        return None


class _DatabaseLock:
    """A lock that a connection to PostgreSQL holds."""

    def __init__(self, driver: DatabaseDriver, session: DatabaseSession, number: int) -> None:
        self._driver, self._session, self._number = driver, session, number

    def close(self) -> None:
        """Release the lock at once. PostgreSQL would notice a closed connection a moment later."""
        try:
            with suppress(StoreUnusable), translating(self._driver):
                self._session.run(f"SELECT pg_advisory_unlock({_CLASS}, ?)", (self._number,))
        finally:
            self._session.close()

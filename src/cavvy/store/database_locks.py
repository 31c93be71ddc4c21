"""Locks between servers that share only a PostgreSQL database: the database's advisory locks."""

from typing import Protocol
from zlib import crc32

from cavvy.store.drivers import DatabaseSession, make_driver, translate

_CLASS = 0x43415659  # the first number of our locks; leases use locks with one number


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

    def try_hold(self, name: str) -> DatabaseSession | None:
        """See `NamedLocks`. Raises StoreUnusable."""
        number = crc32(name.encode()) - (1 << 31)
        try:
            session = self._driver.connect()
            row = session.run(f"SELECT pg_try_advisory_lock({_CLASS}, ?)", (number,)).fetchone()
        except Exception as error:
            if (told := translate(error, self._driver)) is error:
                raise
            raise told from error
        if row is not None and row[0]:
            return session
        session.close()
        return None

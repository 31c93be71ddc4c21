"""Creates the store that a URL names."""

import secrets
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TypeVar

from cavvy.store.base import StoreUnusable
from cavvy.store.drivers import DatabaseDriver, DatabaseSession, translating
from cavvy.store.migrate import bring_to_head
from cavvy.store.sql import Store
from cavvy.store.workers import read, write

_T = TypeVar("_T")
_DRIVER = DatabaseDriver(url="sqlite:///:memory:", path=Path(":memory:"), journal="delete")


class MemoryStore(Store):
    """A store in memory. The store's methods never wait, so each method is atomic on its event
    loop."""

    def __init__(self, make_id: Callable[[], str] = lambda: secrets.token_hex(16)) -> None:
        super().__init__(_DRIVER.url, make_id=make_id)
        self._session = _DRIVER.connect()
        weakref.finalize(self, self._session.close)
        _make_model().copy_into(self._session)
        self._session.run("UPDATE meta SET value = ? WHERE key = 'installation'", (make_id(),))

    async def open(self) -> None:
        """Do nothing, because the database exists already."""

    async def close(self) -> None:
        """Do nothing: the rows are kept until this object is deleted."""

    async def _read(self, work: Callable[[DatabaseSession], _T]) -> _T:
        return read(self._session, work)

    async def _transact(self, work: Callable[[DatabaseSession], _T]) -> _T:
        with translating(_DRIVER):
            return write(self._session, work)


@cache
def _make_model() -> DatabaseSession:
    """Return a database with all tables, and nothing in them. A copy of it needs a twelfth of the
    CPU time of the 200 statements that create them.
    """
    session = _DRIVER.connect()
    bring_to_head(session, str)
    return session


def open_store(
    url: str,
    *,
    journal: str = "auto",
    installation: str | None = None,
) -> Store:
    """Create the store for a URL: memory:, sqlite:///path or postgresql+psycopg://user@host/name.
    The caller must call `await store.open()` before the first use of the store.

    `journal` is SQLite's journal mode: "wal", "delete" for file systems without safe shared memory,
    such as NFS, or "auto". `installation` is the ID that a new SQLite database gets, by default a
    random ID. Raises StoreUnusable for a URL of any other form.
    """
    if url == "memory:":
        return MemoryStore()
    if url.startswith(("sqlite://", "postgresql")):
        if installation is not None and url.startswith("sqlite://"):
            return Store(url, journal=journal, make_id=lambda: installation)
        return Store(url, journal=journal)
    raise StoreUnusable(
        f"cannot open the store {url!r}: expected memory:, sqlite:///path or postgresql+psycopg://…"
    )

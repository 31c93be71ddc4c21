"""A store in memory, for the simulator and tests. The store is the SQL store on an in-memory SQLite
database. The store in memory uses no threads, so it also works in simulated time.
"""

import secrets
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

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
        bring_to_head(self._session, make_id)

    async def open(self) -> None:
        """Do nothing, because the database exists already."""

    async def close(self) -> None:
        """Do nothing: the rows are kept until this object is deleted."""

    async def _read(self, work: Callable[[DatabaseSession], _T]) -> _T:
        return read(self._session, work)

    async def _transact(self, work: Callable[[DatabaseSession], _T]) -> _T:
        with translating(_DRIVER):
            return write(self._session, work)

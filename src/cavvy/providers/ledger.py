"""The launch ledger: records of requested launches and their outcomes, in the state that servers
share.

A provider writes a record before each launch, so that the launch is known even if the reply was
lost or the server crashed. A provider calls `refresh` before it lists its gangs, because another
server may have launched a gang. If another server has changed a record first, a write raises
TryAgain, and the record is read again.
"""

import asyncio
from typing import Generic, Protocol, TypeVar
from weakref import WeakValueDictionary

import msgspec

from cavvy.domain.gangs import ProviderDocument
from cavvy.providers.base import TryAgain
from cavvy.providers.state import ProviderState


class NamedRecord(Protocol):
    @property
    def name(self) -> str: ...


_N = TypeVar("_N", bound=NamedRecord)


class ChangedElsewhere(TryAgain):
    """Raised if another server has changed the record since this server read the record. When the
    exception is raised, the ledger already contains the record as the other server wrote it.
    """


class LaunchLedger(Generic[_N]):
    """The records of a provider's launches, by name. `records` is this process's copy of the
    records, which can be read without I/O.

    When `put` returns, a new record is in the database. Later changes and removals of records are
    accepted even if the database is full or unavailable: they take effect in this process
    immediately, and `refresh` writes them to the database later.
    """

    def __init__(self, state: ProviderState, kind: type[_N], collection: str = "gangs") -> None:
        self._state, self._kind, self._collection = state, kind, collection
        self.records: dict[str, _N] = {}
        self._stored: dict[str, ProviderDocument] = {}  # the records as last read or written
        self._unwritten: set[str] = set()
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._writing: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def lock(self, name: str) -> asyncio.Lock:
        """Return a lock for this process's work on the gang with this name."""
        return self._locks.setdefault(name, asyncio.Lock())

    def get(self, name: str) -> _N | None:
        return self.records.get(name)

    async def refresh(self, name: str | None = None) -> None:
        """Read all records, or only the named record, including changes by other servers. Raises
        TryAgain.
        """
        for each in list(self._unwritten):
            await self._write(each)
        before = dict(self._stored)
        found = {each.name: each for each in await self._state.read(self._collection, name)}
        for each in {*found, *(before if name is None else [name])}:
            same = self._stored.get(each) is before.get(each)
            if same and each not in self._unwritten and found.get(each) != before.get(each):
                self._learn(each, found.get(each))

    async def put(self, record: _N) -> None:
        """Store a record. Raises TryAgain if the record is new and cannot be stored, and
        ChangedElsewhere if another server has written the record first.
        """
        name, before = record.name, self.records.get(record.name)
        if before == record:
            return
        self.records[name] = record
        fault = await self._try_write(name)
        if fault is not None and before is None:  # a new record must be stored before a purchase
            self.records.pop(name, None)
            self._unwritten.discard(name)
            raise fault

    async def drop(self, name: str) -> None:
        """Delete a record. Raises ChangedElsewhere."""
        if self.records.pop(name, None) is not None:
            await self._try_write(name)

    async def _try_write(self, name: str) -> TryAgain | None:
        """Write a changed record. Return the fault if it cannot be stored now; `refresh` then
        writes the change later. Raises ChangedElsewhere.
        """
        self._unwritten.add(name)
        try:
            await self._write(name)
        except ChangedElsewhere:
            raise
        except TryAgain as fault:
            return fault
        return None

    async def _write(self, name: str) -> None:
        async with self._writing.setdefault(name, asyncio.Lock()):
            record, stored = self.records.get(name), self._stored.get(name)
            if name not in self._unwritten:
                return  # an earlier write included this change, or found a conflict
            document = ProviderDocument(
                collection=self._collection,
                name=name,
                body="" if record is None else msgspec.json.encode(record).decode(),
                version=stored.version + 1 if stored else 1,
            )
            if record is None and stored is None:
                self._unwritten.discard(name)
            elif await self._state.swap(document, delete=record is None):
                self._unwritten -= {name} if self.records.get(name) is record else set()
                self._stored[name] = document
                if record is None:
                    del self._stored[name]
            else:
                self._unwritten.discard(name)
                found = await self._state.read(self._collection, name)
                self._learn(name, found[0] if found else None)
                raise ChangedElsewhere(
                    f"{name}: another server of this installation changed the record"
                )

    def _learn(self, name: str, document: ProviderDocument | None) -> None:
        self.records.pop(name, None)
        self._stored.pop(name, None)
        if document is not None:
            self._stored[name] = document
            self.records[name] = msgspec.json.decode(document.body, type=self._kind)

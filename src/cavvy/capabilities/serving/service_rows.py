"""The rows of services."""

from datetime import datetime

import msgspec

from cavvy.capabilities.serving.stored_services import StoredService
from cavvy.domain.values import replace
from cavvy.store.drivers import DatabaseSession, RunTransaction
from cavvy.store.named_rows import NamedRows
from cavvy.store.sql import Store

_decode = msgspec.json.Decoder(StoredService).decode


def services_of(store: Store) -> "SqlServices":
    """Return the services of a store."""
    return SqlServices(*store.database)


class SqlServices(NamedRows[StoredService]):
    """The rows of services."""

    def __init__(self, read: RunTransaction, write: RunTransaction) -> None:
        super().__init__(
            read,
            write,
            "services",
            "service",
            _decode,
            ("snapshot",),
            lambda service: (service.origin.snapshot,),
        )

    async def delete(self, row: StoredService) -> None:
        """Delete a service and its figures. Raises StaleVersion."""
        values = (row.project, row.name, row.version)

        def change(session: DatabaseSession) -> None:
            self._change(session, self._delete, values, row)
            session.run("DELETE FROM figures WHERE attempt_id = ?", (row.id,))

        await self._write(change)

    async def snapshots(self) -> set[str]:
        """Return the snapshots of the revisions that are on trial or can still be restored. The
        method decodes the document of every service, because snapshots are stored nowhere else.
        """
        others = [
            part
            for each in await self.list()
            for part in (each.candidate, each.former, each.worked)
        ]
        found = [None if each is None else each.origin.snapshot for each in others]
        return {each for each in found if each is not None}

    async def count_keys(self, now: datetime) -> int:
        """Return the number of keys that have not expired."""
        ends = [key.expires_at for each in await self.list() for key in each.keys]
        return sum(end is None or end > now for end in ends)

    async def end_keys(self) -> None:
        """Remove all keys."""
        for service in await self.list():
            if service.keys:
                await self.put(replace(service, keys=()))

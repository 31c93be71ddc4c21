"""Services: `Store.services`."""

from collections.abc import Sequence

from cavvy.domain.stored_services import StoredService
from cavvy.domain.values import replace
from cavvy.store.accounts import in_projects
from cavvy.store.archive import check_open
from cavvy.store.base import ProjectFilter, RowNotFound, StaleVersion
from cavvy.store.documents import decode_service, encode
from cavvy.store.drivers import DatabaseSession, RunTransaction
from cavvy.store.rows import insert_into, update_of

_COLUMNS = ("snapshot", "document", "version")
_KEY = ("project", "name")
_INSERT = insert_into("services", (*_COLUMNS, *_KEY), "ON CONFLICT DO NOTHING")
_UPDATE = update_of("services", _COLUMNS, (*_KEY, "version"))
_DELETE = "DELETE FROM services WHERE project = ? AND name = ? AND version = ?"


class SqlServices:
    """The rows of services."""

    def __init__(self, read: RunTransaction, write: RunTransaction) -> None:
        self._read = read
        self._write = write

    async def get(self, project: str, name: str) -> StoredService:
        """Return the service with this name. Raises RowNotFound."""
        sql = "SELECT document FROM services WHERE project = ? AND name = ?"
        rows = await self._read(lambda session: session.run(sql, (project, name)).fetchall())
        for row in rows:
            return decode_service(row[0])
        raise RowNotFound(f"project {project} has no service named {name}")

    async def list(self, projects: ProjectFilter = None) -> Sequence[StoredService]:
        """Return the services, sorted by project and name."""
        where, values = in_projects("project", projects)
        sql = f"SELECT document FROM services WHERE {where} ORDER BY project, name"
        rows = await self._read(lambda session: session.run(sql, values).fetchall())
        return [decode_service(row[0]) for row in rows]

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

    async def put(self, service: StoredService) -> StoredService:
        """Insert the service (if its version is 0) or replace it, and return the stored service.
        Raises StaleVersion.
        """
        stored = replace(service, version=service.version + 1)
        key = (service.project, service.name)
        values = [service.origin.snapshot, encode(stored), stored.version, *key]
        sql = _INSERT
        if service.version:
            sql, values = _UPDATE, [*values, service.version]
        await self._write(lambda session: _change(session, sql, values, service))
        return stored

    async def delete(self, service: StoredService) -> None:
        """Delete a service. Raises StaleVersion."""
        values = (service.project, service.name, service.version)
        await self._write(lambda session: _change(session, _DELETE, values, service))


def _change(
    session: DatabaseSession, sql: str, values: Sequence[object], service: StoredService
) -> None:
    if sql == _INSERT:
        check_open(session, [service.project])
    if session.run(sql, values).rowcount == 0:
        raise StaleVersion(f"service {service.name} is not at version {service.version}")

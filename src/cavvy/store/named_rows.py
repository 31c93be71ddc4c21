"""Rows that have a name in their project, such as those of elastic pools (`Store.node_pools`)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from cavvy.domain.jobs import JOB_ENDS, Attempt, JobPhase
from cavvy.domain.node_pools import NodePool
from cavvy.domain.values import replace
from cavvy.store.accounts import check_open, in_projects
from cavvy.store.base import ProjectFilter, RowNotFound, StaleVersion
from cavvy.store.documents import decode_attempt, decode_pool, encode
from cavvy.store.drivers import DatabaseSession, RunTransaction
from cavvy.store.rows import insert_into, update_of

_KEY = ("project", "name")


class NamedRow(Protocol):
    """A row with a name in its project."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def project(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def version(self) -> int: ...


_Named = TypeVar("_Named", bound=NamedRow)
_LIVE = ", ".join(f"'{phase}'" for phase in JobPhase if phase not in JOB_ENDS)
_JOBS = (
    f"SELECT id, phase FROM jobs WHERE project = ? AND pool = ? AND phase IN ({_LIVE}) ORDER BY id"
)
# The CROSS JOIN makes SQLite begin with the few open attempts.
_ATTEMPTS = (
    "SELECT a.document FROM attempts a CROSS JOIN jobs j WHERE a.phase <> 'ended' "
    "AND j.id = a.job_id AND j.project = ? AND j.pool = ? ORDER BY a.id"
)


class NamedRows(Generic[_Named]):
    """The rows of a table of documents, each with a name in its project. `noun` is the word for a
    row in messages, and `more` returns the values of the columns `others`."""

    def __init__(
        self,
        read: RunTransaction,
        write: RunTransaction,
        table: str,
        noun: str,
        decode: Callable[[str], _Named],
        others: tuple[str, ...] = (),
        more: Callable[[_Named], tuple[object, ...]] = lambda row: (),
    ) -> None:
        self._read = read
        self._write = write
        self._noun, self._decode, self._more = noun, decode, more
        columns = (*others, "document", "version")
        self._insert = insert_into(table, (*columns, *_KEY), "ON CONFLICT DO NOTHING")
        self._update = update_of(table, columns, (*_KEY, "version"))
        self._delete = f"DELETE FROM {table} WHERE project = ? AND name = ? AND version = ?"
        self._select = f"SELECT document FROM {table} WHERE"

    async def get(self, project: str, name: str) -> _Named:
        """Return the row with this name. Raises RowNotFound."""
        sql = f"{self._select} project = ? AND name = ?"
        rows = await self._read(lambda session: session.run(sql, (project, name)).fetchall())
        for row in rows:
            return self._decode(row[0])
        raise RowNotFound(f"project {project} has no {self._noun} named {name}")

    async def list(self, projects: ProjectFilter = None) -> Sequence[_Named]:
        """Return the rows, sorted by project and name."""
        where, values = in_projects("project", projects)
        sql = f"{self._select} {where} ORDER BY project, name"
        rows = await self._read(lambda session: session.run(sql, values).fetchall())
        return [self._decode(row[0]) for row in rows]

    async def put(self, row: _Named) -> _Named:
        """Insert the row (if its version is 0) or replace it, and return the stored row. Raises
        StaleVersion.
        """
        stored = replace(row, version=row.version + 1)
        values = [*self._more(row), encode(stored), stored.version, row.project, row.name]
        sql = self._insert
        if row.version:
            sql, values = self._update, [*values, row.version]
        await self._write(lambda session: self._change(session, sql, values, row))
        return stored

    async def delete(self, row: _Named) -> None:
        """Delete a row. Raises StaleVersion."""
        values = (row.project, row.name, row.version)
        await self._write(lambda session: self._change(session, self._delete, values, row))

    def _change(
        self, session: DatabaseSession, sql: str, values: Sequence[object], row: _Named
    ) -> None:
        if sql == self._insert:
            check_open(session, [row.project])
        if session.run(sql, values).rowcount == 0:
            raise StaleVersion(f"{self._noun} {row.name} is not at version {row.version}")


class SqlNodePools(NamedRows[NodePool]):
    """The rows of elastic pools, and the jobs and attempts that belong to them."""

    def __init__(self, read: RunTransaction, write: RunTransaction) -> None:
        super().__init__(read, write, "node_pools", "pool", decode_pool)

    async def attempts(self, project: str, name: str) -> Sequence[Attempt]:
        """Return the attempts whose gangs belong to the pool and may exist."""
        rows = await self._read(lambda session: session.run(_ATTEMPTS, (project, name)).fetchall())
        return [decode_attempt(row[0]) for row in rows]

    async def jobs(self, project: str, name: str) -> Mapping[str, JobPhase]:
        """Return the phase of each of the pool's unfinished jobs by its ID, oldest first."""
        rows = await self._read(lambda session: session.run(_JOBS, (project, name)).fetchall())
        return {job_id: JobPhase(phase) for job_id, phase in rows}

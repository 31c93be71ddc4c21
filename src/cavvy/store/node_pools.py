"""Elastic pools: `Store.node_pools`."""

from collections.abc import Mapping, Sequence

from cavvy.domain.jobs import JOB_ENDS, Attempt, JobPhase
from cavvy.domain.node_pools import NodePool
from cavvy.domain.values import replace
from cavvy.store.accounts import in_projects
from cavvy.store.archive import check_open
from cavvy.store.base import ProjectFilter, RowNotFound, StaleVersion
from cavvy.store.documents import decode_attempt, decode_pool, encode
from cavvy.store.drivers import DatabaseSession, RunTransaction
from cavvy.store.rows import insert_into, update_of

_COLUMNS = ("document", "version")
_KEY = ("project", "name")
_INSERT = insert_into("node_pools", (*_COLUMNS, *_KEY), "ON CONFLICT DO NOTHING")
_UPDATE = update_of("node_pools", _COLUMNS, (*_KEY, "version"))
_DELETE = "DELETE FROM node_pools WHERE project = ? AND name = ? AND version = ?"
_LIVE = ", ".join(f"'{phase}'" for phase in JobPhase if phase not in JOB_ENDS)
_JOBS = (
    f"SELECT id, phase FROM jobs WHERE project = ? AND pool = ? AND phase IN ({_LIVE}) ORDER BY id"
)
# The CROSS JOIN makes SQLite begin with the few open attempts.
_ATTEMPTS = (
    "SELECT a.document FROM attempts a CROSS JOIN jobs j WHERE a.phase <> 'ended' "
    "AND j.id = a.job_id AND j.project = ? AND j.pool = ? ORDER BY a.id"
)


class SqlNodePools:
    """The rows of elastic pools, and the jobs and attempts that belong to them."""

    def __init__(self, read: RunTransaction, write: RunTransaction) -> None:
        self._read = read
        self._write = write

    async def get(self, project: str, name: str) -> NodePool:
        """Return the pool with this name. Raises RowNotFound."""
        sql = "SELECT document FROM node_pools WHERE project = ? AND name = ?"
        rows = await self._read(lambda session: session.run(sql, (project, name)).fetchall())
        for row in rows:
            return decode_pool(row[0])
        raise RowNotFound(f"project {project} has no pool named {name}")

    async def list(self, projects: ProjectFilter = None) -> Sequence[NodePool]:
        """Return the pools, sorted by project and name."""
        where, values = in_projects("project", projects)
        sql = f"SELECT document FROM node_pools WHERE {where} ORDER BY project, name"
        rows = await self._read(lambda session: session.run(sql, values).fetchall())
        return [decode_pool(row[0]) for row in rows]

    async def put(self, pool: NodePool) -> NodePool:
        """Insert the pool (if its version is 0) or replace it, and return the stored pool. Raises
        StaleVersion.
        """
        stored = replace(pool, version=pool.version + 1)
        values: list[object] = [encode(stored), stored.version, pool.project, pool.name]
        sql = _INSERT
        if pool.version:
            sql, values = _UPDATE, [*values, pool.version]
        await self._write(lambda session: _change(session, sql, values, pool))
        return stored

    async def delete(self, pool: NodePool) -> None:
        """Delete a pool. Raises StaleVersion."""
        values = (pool.project, pool.name, pool.version)
        await self._write(lambda session: _change(session, _DELETE, values, pool))

    async def attempts(self, project: str, name: str) -> Sequence[Attempt]:
        """Return the attempts whose gangs belong to the pool and may exist."""
        rows = await self._read(lambda session: session.run(_ATTEMPTS, (project, name)).fetchall())
        return [decode_attempt(row[0]) for row in rows]

    async def jobs(self, project: str, name: str) -> Mapping[str, JobPhase]:
        """Return the phase of each of the pool's unfinished jobs by its ID, oldest first."""
        rows = await self._read(lambda session: session.run(_JOBS, (project, name)).fetchall())
        return {job_id: JobPhase(phase) for job_id, phase in rows}


def _change(session: DatabaseSession, sql: str, values: Sequence[object], pool: NodePool) -> None:
    if sql == _INSERT:
        check_open(session, [pool.project])
    if session.run(sql, values).rowcount == 0:
        raise StaleVersion(f"pool {pool.name} is not at version {pool.version}")

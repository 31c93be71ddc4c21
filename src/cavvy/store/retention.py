"""Removes the rows of ended jobs that are no longer kept (`Store.retention`). Each call is a
short transaction, so that other writers never wait for long.
"""

from collections.abc import Sequence
from datetime import datetime

from cavvy.domain.audit import AuditCut
from cavvy.domain.retention import AUDIT_SETTING, EndedJob, RemovedJob
from cavvy.store.audit import cut_log, find_cut
from cavvy.store.dependencies import delete_dependencies, holds
from cavvy.store.documents import to_micros, to_time
from cavvy.store.drivers import DatabaseSession, RunTransaction
from cavvy.store.own_tables import list_tables_of_attempts
from cavvy.store.rows import RowCodec

_REMOVED = RowCodec(RemovedJob, "removed_jobs", key=("job_id",))
_ENDED = (
    "SELECT id, ended_at, removed IS NOT NULL FROM jobs WHERE project = ? AND ended_at < ? "
    "AND (ended_at, id) > (?, ?) ORDER BY ended_at, id LIMIT ?"
)
_FIRST = (-1, "")  # before all jobs
_GANGS = "SELECT bought_as, gang FROM attempts WHERE job_id = ?"
# A gang that another job uses has one bill for both; the charges of this job are a part of it.
_SHARED = (
    "SELECT 1 FROM attempts a JOIN attempts o ON o.bought_as = a.bought_as "
    "WHERE a.job_id = ? AND o.phase <> 'ended'"
)
_VOLUMES = "SELECT document FROM volume_bills"
_OF_ATTEMPTS = ("nodes", "figures", "agent_contacts")
_OF_JOB = ("charges", "attempts", "events", "checkpoints", "documents")
_FORGET = (
    "DELETE FROM removed_jobs WHERE job_id IN "
    "(SELECT job_id FROM removed_jobs WHERE removed_at < ? ORDER BY removed_at LIMIT ?)"
)


class SqlRetention:
    """The rows that are removed because of their age."""

    def __init__(self, read: RunTransaction, write: RunTransaction) -> None:
        self._read, self._write = read, write

    async def list_ended(
        self, project: str, before: datetime, after: EndedJob | None, limit: int
    ) -> Sequence[EndedJob]:
        """Return the project's jobs that ended before this time, the oldest first, including jobs
        that users have removed. `after` is the last job of the page before.
        """
        last = _FIRST if after is None else (to_micros(after.ended_at), after.id)
        values = (project, to_micros(before), *last, limit)
        rows = await self._read(lambda session: session.run(_ENDED, values).fetchall())
        return [EndedJob(id=row[0], ended_at=to_time(row[1]), removed=bool(row[2])) for row in rows]

    async def purge(self, job: RemovedJob) -> bool:
        """Delete all rows of a job except its entries in the ledger. The job must have ended and
        been removed. `find_removed` then returns `job`, unless its name is empty. If another job
        uses a gang of this job or waits for this job, or the bill of a volume is computed from this
        job, delete nothing and return False.
        """
        return await self._write(lambda session: _purge(session, job))

    async def find_removed(self, project: str, name_or_id: str) -> RemovedJob | None:
        """Return the last job with this name or ID that `purge` has deleted, or None."""
        sql = f"{_REMOVED.select} WHERE project = ? AND {{}} = ? ORDER BY removed_at DESC LIMIT 1"

        def read(session: DatabaseSession) -> RemovedJob | None:
            for column in ("name", "job_id"):
                row = session.run(sql.format(column), (project, name_or_id)).fetchone()
                if row is not None:
                    return _REMOVED.make(row)
            return None

        return await self._read(read)

    async def cut_audit(self, before: datetime, now: datetime, days: int, limit: int) -> bool:
        """Remove at most `limit` records of the audit log that are older than `before`. A new
        record says so. Return whether any were removed.
        """

        def work(session: DatabaseSession) -> bool:
            head = find_cut(session, before, limit)
            if head is None:
                return False
            cut_log(
                session,
                AuditCut(head=head, at=now, before=before, rule=AUDIT_SETTING, days=days),
            )
            return True

        return await self._write(work)

    async def oldest_audit(self) -> datetime | None:
        """Return the time of the oldest record of the audit log, or None."""
        sql = "SELECT at FROM audit_log ORDER BY number LIMIT 1"
        row = await self._read(lambda session: session.run(sql).fetchone())
        return None if row is None else to_time(row[0])

    async def forget_removed(self, before: datetime, limit: int) -> None:
        """Forget at most `limit` jobs that `purge` deleted before this time."""
        values = (to_micros(before), limit)
        await self._write(lambda session: session.run(_FORGET, values))

    async def size_mib(self) -> int:
        """Return the size of the database, rounded up. It includes unused space."""
        return await self._read(_read_size_mib)

    async def shrink(self, limit_mib: int) -> None:
        """Return at most this much unused space of a SQLite file to the disk."""
        await self._write(lambda session: _shrink(session, limit_mib))


def _purge(session: DatabaseSession, job: RemovedJob) -> bool:
    key = (job.job_id,)
    if session.run(_SHARED, key).fetchone() or _has_billed_volume(session, job.job_id):
        return False
    if holds(session, job.job_id):
        return False
    row = session.run("SELECT removed IS NULL FROM jobs WHERE id = ?", key).fetchone()
    if row is None:
        return True  # another server was first
    if row[0]:
        raise ValueError(f"job {job.job_id} must be removed before its rows are deleted")
    own = "SELECT id FROM attempts WHERE job_id = ?"
    for table in (*_OF_ATTEMPTS, *list_tables_of_attempts()):
        session.run(f"DELETE FROM {table} WHERE attempt_id IN ({own})", key)
    for table in _OF_JOB:
        session.run(f"DELETE FROM {table} WHERE job_id = ?", key)
    delete_dependencies(session, job.job_id)
    session.run("DELETE FROM jobs WHERE id = ?", key)
    if job.name:
        session.run(f"{_REMOVED.insert} ON CONFLICT DO NOTHING", _REMOVED.values(job))
    return True


def _has_billed_volume(session: DatabaseSession, job_id: str) -> bool:
    """Return whether the bill of a volume may need the charges of this job. See
    `StorageMeter`."""
    documents = [row[0] for row in session.run(_VOLUMES).fetchall()]
    if not documents:
        return False
    gangs = {name for row in session.run(_GANGS, (job_id,)).fetchall() for name in row if name}
    return any(f'"{gang}"' in document for gang in gangs for document in documents)


def _shrink(session: DatabaseSession, limit_mib: int) -> None:
    if not session.driver.is_sqlite:
        return  # PostgreSQL does this itself (autovacuum)
    [[page_bytes]] = session.run("PRAGMA page_size").fetchall()
    [[unused]] = session.run("PRAGMA freelist_count").fetchall()
    for _ in range(min(unused, limit_mib * 2**20 // page_bytes)):
        # Python's module ends this statement after one page, also if the argument is larger
        session.run("PRAGMA incremental_vacuum(1)").fetchall()


def _read_size_mib(session: DatabaseSession) -> int:
    if session.driver.is_sqlite:
        [[pages]] = session.run("PRAGMA page_count").fetchall()
        [[page_bytes]] = session.run("PRAGMA page_size").fetchall()
        return int(-(-pages * page_bytes // 2**20))
    [[size]] = session.run("SELECT pg_database_size(current_database())").fetchall()
    return int(-(-size // 2**20))

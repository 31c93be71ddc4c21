"""The store in SQLite (one server) or PostgreSQL (teams): statements as text, run by threads that
own a connection.

Reads here, writes in `writes.py`. Every statement on a tenant's rows names its project or goes by a
key.
"""

import asyncio
import secrets
from collections.abc import Callable, Collection, Sequence
from datetime import datetime
from typing import TypeVar

from cavvy.domain.allocations import Allocation, Host
from cavvy.domain.checkpoints import SavedCheckpoint
from cavvy.domain.events import Charge, Event
from cavvy.domain.jobs import JOB_ENDS, Attempt, Job, JobPhase, Node
from cavvy.domain.markets import MarketTally, Observation
from cavvy.domain.units import Money
from cavvy.store.base import AtomicWrite, RowNotFound, SealedSecret, StoreUnusable, SummaryPage
from cavvy.store.documents import decode_attempt, decode_node, encode, to_micros, to_time
from cavvy.store.drivers import DatabaseDriver, DatabaseSession, Row, make_driver, translate
from cavvy.store.rows import (
    ALLOCATION_COLUMNS,
    CHARGE_COLUMNS,
    CHECKPOINT_COLUMNS,
    EVENT_COLUMNS,
    HOST_COLUMNS,
    OBSERVATION_COLUMNS,
    SELECT_JOB,
    SELECT_TALLIES,
    SUMMARY_COLUMNS,
    DocumentCache,
    make_allocation,
    make_charge,
    make_checkpoint,
    make_event,
    make_host,
    make_job,
    make_observation,
    make_summary,
    make_tally,
    to_micros_or_none,
)
from cavvy.store.workers import StoreWorkers
from cavvy.store.writes import insert_job, save_checkpoint, write_changes

_T = TypeVar("_T")
_GROUP = 64  # works in one SQLite transaction at most; more would keep the first waiting
_LIVE = ", ".join(f"'{phase}'" for phase in JobPhase if phase not in JOB_ENDS)
_READY = "phase = 'queued' AND stop_reason IS NULL AND (not_before IS NULL OR not_before <= ?)"
_WAITING = f"{SELECT_JOB} WHERE {_READY} ORDER BY priority DESC, id LIMIT ?"
_UNFINISHED = (
    f"SELECT id FROM jobs WHERE phase IN ({_LIVE}) UNION SELECT job_id FROM attempts "
    "WHERE phase <> 'ended' ORDER BY 1"
)


def _new_id() -> str:
    return secrets.token_hex(16)


class SqlStore:
    """A store in a database. `url` is sqlite:///path or postgresql+psycopg://user@host/name; see
    `open_store`.
    """

    def __init__(
        self, url: str, *, journal: str = "auto", make_id: Callable[[], str] = _new_id
    ) -> None:
        if journal not in ("auto", "wal", "delete"):
            raise StoreUnusable(f"journal is {journal!r}; expected auto, wal or delete")
        self._url = url
        self._journal = journal
        self._make_id = make_id
        self._documents = DocumentCache()
        self._readers: StoreWorkers | None = None
        self._writers: StoreWorkers | None = None

    async def open(self) -> None:
        driver = await asyncio.to_thread(self._prepare)
        self._readers = StoreWorkers(driver, count=2 if driver.is_sqlite else 4)
        self._writers = (
            StoreWorkers(driver, count=1, group=_GROUP)
            if driver.is_sqlite
            else StoreWorkers(driver, count=4, group=1)
        )

    def _prepare(self) -> DatabaseDriver:
        from cavvy.store.migrate import prepare

        driver = make_driver(self._url, journal=self._journal)
        try:
            return prepare(driver, self._make_id)
        except Exception as error:
            if (told := translate(error, driver)) is error:
                raise
            raise told from error

    async def close(self) -> None:
        for workers in (
            self._readers,
            self._writers,
        ):  # the last to close, a writer, empties the WAL
            if workers is not None:
                await asyncio.to_thread(workers.close)

    async def _read(self, work: Callable[[DatabaseSession], _T]) -> _T:
        if self._readers is None:
            raise StoreUnusable("the store is not open")
        return await self._readers.do(work)

    async def _write(self, work: Callable[[DatabaseSession], _T]) -> _T:
        if self._writers is None:
            raise StoreUnusable("the store is not open")
        return await self._writers.do(work)

    async def _rows(self, sql: str, *values: object) -> list[Row]:
        return await self._read(lambda session: session.run(sql, values).fetchall())

    async def _row(self, missing: str, sql: str, *values: object) -> Row:
        row = await self._read(lambda session: session.run(sql, values).fetchone())
        if row is None:
            raise RowNotFound(missing)
        return row

    async def installation(self) -> str:
        value: str = (
            await self._row(
                "no installation id", "SELECT value FROM meta WHERE key = 'installation'"
            )
        )[0]
        return value

    # Jobs

    async def commit(self, changes: AtomicWrite) -> None:
        written = await self._write(
            lambda session: write_changes(session, changes, self._documents)
        )
        for row in written:
            if row.documents:
                self._documents.keep(row.job.id, row.job.version, row.job.task, row.job.origin)

    async def submit(self, job: Job, event: Event) -> Job:
        stored = await self._write(lambda session: insert_job(session, job, event))
        self._documents.keep(stored.id, stored.version, stored.task, stored.origin)
        return stored

    async def job(self, job_id: str) -> Job:
        row = await self._row(f"no job {job_id}", f"{SELECT_JOB} WHERE j.id = ?", job_id)
        return make_job(row, self._documents)

    async def find_job(self, project: str, name_or_id: str) -> Job:
        missing = f"project {project} has no job named {name_or_id}"
        try:
            row = await self._row(
                missing, f"{SELECT_JOB} WHERE j.project = ? AND j.name = ?", project, name_or_id
            )
        except RowNotFound:
            row = await self._row(
                missing, f"{SELECT_JOB} WHERE j.project = ? AND j.id = ?", project, name_or_id
            )
        return make_job(row, self._documents)

    async def list_jobs(
        self,
        project: str | None,
        phases: Collection[JobPhase] = (),
        cursor: str | None = None,
        limit: int = 50,
    ) -> SummaryPage:
        sql, values = _listing(project, phases, cursor, limit + 1)
        rows = await self._rows(sql, *values)
        more = len(rows) > limit
        return SummaryPage(
            jobs=[make_summary(row) for row in rows[:limit]],
            cursor=rows[limit - 1][0] if more and limit else None,
        )

    async def count_jobs(self, project: str | None) -> dict[JobPhase, int]:
        where, values = ("", ()) if project is None else (" WHERE project = ?", (project,))
        rows = await self._rows(f"SELECT phase, COUNT(*) FROM jobs{where} GROUP BY phase", *values)
        return {JobPhase(row[0]): row[1] for row in rows}

    async def waiting(self, now: datetime, limit: int) -> Sequence[Job]:
        rows = await self._rows(_WAITING, to_micros(now), limit)
        return [make_job(row, self._documents) for row in rows]

    async def next_waiting(self, now: datetime) -> datetime | None:
        sql = (
            "SELECT MIN(not_before) FROM jobs WHERE phase = 'queued' AND stop_reason IS NULL AND "
            "not_before > ?"
        )
        micros = (await self._rows(sql, to_micros(now)))[0][0]
        return None if micros is None else to_time(micros)

    async def queue_position(self, job: Job, now: datetime | None = None) -> int:
        if job.phase is not JobPhase.QUEUED:
            return 0
        sql = (
            "SELECT COUNT(*) FROM jobs WHERE phase = 'queued' AND stop_reason IS NULL"
            " AND (priority > ? OR (priority = ? AND id < ?))"
        )
        values: tuple[object, ...] = (job.task.priority, job.task.priority, job.id)
        if now is not None:
            sql += " AND (not_before IS NULL OR not_before <= ?)"
            values += (to_micros(now),)
        first: int = (await self._rows(sql, *values))[0][0]
        return first + 1

    async def snapshots(self) -> Collection[str]:
        return {
            row[0]
            for row in await self._rows(
                "SELECT DISTINCT snapshot FROM documents WHERE snapshot IS NOT NULL"
            )
        }

    async def unfinished(self) -> Sequence[str]:
        return [row[0] for row in await self._rows(_UNFINISHED)]

    # Attempts, nodes and their story

    async def attempts(self, job_id: str) -> Sequence[Attempt]:
        rows = await self._rows(
            "SELECT document FROM attempts WHERE job_id = ? ORDER BY number", job_id
        )
        return [decode_attempt(row[0]) for row in rows]

    async def attempt_of_gang(self, gang: str) -> Attempt:
        sql = "SELECT document FROM attempts WHERE gang = ?"
        return decode_attempt((await self._row(f"no attempt has the gang {gang}", sql, gang))[0])

    async def open_attempts(self, project: str | None = None) -> Sequence[Attempt]:
        where, values = ("", ()) if project is None else (" AND project = ?", (project,))
        rows = await self._rows(
            f"SELECT document FROM attempts WHERE phase <> 'ended'{where} ORDER BY id", *values
        )
        return [decode_attempt(row[0]) for row in rows]

    async def nodes(self, attempt_id: str) -> Sequence[Node]:
        rows = await self._rows(
            "SELECT document FROM nodes WHERE attempt_id = ? ORDER BY rank", attempt_id
        )
        return [decode_node(row[0]) for row in rows]

    async def node(self, attempt_id: str, rank: int) -> Node:
        missing = f"attempt {attempt_id} has no rank {rank}"
        sql = "SELECT document FROM nodes WHERE attempt_id = ? AND rank = ?"
        return decode_node((await self._row(missing, sql, attempt_id, rank))[0])

    async def events(self, job_id: str, after: int = 0, limit: int = 1000) -> Sequence[Event]:
        sql = f"SELECT {EVENT_COLUMNS} FROM events WHERE job_id = ? AND id > ? ORDER BY id LIMIT ?"
        return [make_event(row) for row in await self._rows(sql, job_id, after, limit)]

    async def charges(self, job_id: str) -> Sequence[Charge]:
        sql = (
            f"SELECT {CHARGE_COLUMNS} FROM charges WHERE job_id = ? ORDER BY attempt_id, rank, "
            "since, kind"
        )
        return [make_charge(row) for row in await self._rows(sql, job_id)]

    async def spent(self, project: str, since: datetime | None = None) -> Money:
        sql = (
            "SELECT CAST(COALESCE(SUM(amount), 0) AS BIGINT) FROM charges WHERE project = ? AND "
            "since >= ?"
        )
        start = to_micros_or_none(since)
        return Money((await self._rows(sql, project, -(1 << 62) if start is None else start))[0][0])

    # Checkpoints

    async def save_checkpoint(
        self, checkpoint: SavedCheckpoint, *, on_behalf: int, keep: int = 2
    ) -> SavedCheckpoint:
        return await self._write(
            lambda session: save_checkpoint(session, checkpoint, on_behalf, keep)
        )

    async def checkpoints(self, job_id: str) -> Sequence[SavedCheckpoint]:
        sql = f"SELECT {CHECKPOINT_COLUMNS} FROM checkpoints WHERE job_id = ? ORDER BY number DESC"
        return [make_checkpoint(row) for row in await self._rows(sql, job_id)]

    # Markets

    async def observations(
        self, markets: Collection[str], since: datetime, limit: int = 2000
    ) -> Sequence[Observation]:
        if not markets:
            return []
        marks = ", ".join("?" for _ in markets)
        sql = (
            f"SELECT {OBSERVATION_COLUMNS} FROM observations WHERE market IN ({marks}) AND at >= ?"
            " ORDER BY at DESC, id DESC LIMIT ?"
        )
        rows = await self._rows(sql, *sorted(markets), to_micros(since), limit)
        return [make_observation(row) for row in reversed(rows)]

    async def tallies(self, since: datetime) -> Sequence[MarketTally]:
        return [make_tally(row) for row in await self._rows(SELECT_TALLIES, to_micros(since))]

    async def forget_observations(self, before: datetime) -> None:
        sql = "DELETE FROM observations WHERE at < ?"
        await self._write(lambda session: session.run(sql, (to_micros(before),)).rowcount)

    # Hosts, allocations and secrets

    async def put_host(self, host: Host) -> None:
        sql = (
            f"INSERT INTO hosts ({HOST_COLUMNS}) VALUES (?, ?, ?, ?) ON CONFLICT (name) DO UPDATE"
            " SET cpus = excluded.cpus, memory_mib = excluded.memory_mib, devices = "
            "excluded.devices"
        )
        values = (host.name, host.cpus, host.memory_mib, encode(host.devices))
        await self._write(lambda session: session.run(sql, values).rowcount)

    async def hosts(self) -> Sequence[Host]:
        return [
            make_host(row)
            for row in await self._rows(f"SELECT {HOST_COLUMNS} FROM hosts ORDER BY name")
        ]

    async def allocations(self, host: str | None = None) -> Sequence[Allocation]:
        where, values = ("", ()) if host is None else (" WHERE host = ?", (host,))
        rows = await self._rows(
            f"SELECT {ALLOCATION_COLUMNS} FROM allocations{where} ORDER BY host, gang, rank",
            *values,
        )
        return [make_allocation(row) for row in rows]

    async def put_secret(self, secret: SealedSecret) -> None:
        sql = (
            "INSERT INTO secrets (project, name, sealed, updated_at) VALUES (?, ?, ?, ?)"
            " ON CONFLICT (project, name) DO UPDATE SET sealed = excluded.sealed, updated_at = "
            "excluded.updated_at"
        )
        values = (secret.project, secret.name, secret.sealed, to_micros(secret.updated_at))
        await self._write(lambda session: session.run(sql, values).rowcount)

    async def secrets(self, project: str) -> Sequence[SealedSecret]:
        rows = await self._rows(
            "SELECT name, sealed, updated_at FROM secrets WHERE project = ? ORDER BY name", project
        )
        return [
            SealedSecret(project=project, name=row[0], sealed=row[1], updated_at=to_time(row[2]))
            for row in rows
        ]

    async def delete_secret(self, project: str, name: str) -> None:
        sql = "DELETE FROM secrets WHERE project = ? AND name = ?"
        if await self._write(lambda session: session.run(sql, (project, name)).rowcount) == 0:
            raise RowNotFound(f"project {project} has no secret named {name}")


def _listing(
    project: str | None, phases: Collection[JobPhase], cursor: str | None, limit: int
) -> tuple[str, tuple[object, ...]]:
    """Newest first. Each phase is a walk of its own index, so that a rare one is found among
    100,000 jobs.
    """
    where, values = [], []
    if project is not None:
        where.append("project = ?")
        values.append(project)
    if cursor is not None:
        where.append("id < ?")
        values.append(cursor)
    wanted = [phase for phase in JobPhase if phase in phases]
    if not wanted:
        condition = f" WHERE {' AND '.join(where)}" if where else ""
        return f"SELECT {SUMMARY_COLUMNS} FROM jobs{condition} ORDER BY id DESC LIMIT ?", (
            *values,
            limit,
        )
    one = (
        f"SELECT {SUMMARY_COLUMNS} FROM jobs WHERE {' AND '.join(['phase = ?', *where])} ORDER "
        "BY id DESC LIMIT ?"
    )
    every: list[object] = [value for phase in wanted for value in (str(phase), *values, limit)]
    if len(wanted) == 1:
        return one, tuple(every)
    parts = " UNION ALL ".join(f"SELECT * FROM ({one}) AS p{i}" for i in range(len(wanted)))
    return f"{parts} ORDER BY id DESC LIMIT ?", (*every, limit)

"""The store in SQLite (for one server) or PostgreSQL (for teams). The SQL is executed by threads,
each with its own connection.

The functions that write rows are in `writes.py`. Every statement that reads or changes rows of a
project has a condition on the project or on a primary key.
"""

import asyncio
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple, TypeVar

from cavvy.domain.accounts import Account, AccountCredential, AccountToken, Project, RoleBinding
from cavvy.domain.allocations import Allocation, Host
from cavvy.domain.audit import AuditEntry, AuditOutcome, ChainHead, SealedRecord
from cavvy.domain.checkpoints import SavedCheckpoint
from cavvy.domain.events import Announcement, Charge, Event
from cavvy.domain.gangs import ProviderDocument
from cavvy.domain.jobs import JOB_ENDS, Attempt, AttemptPhase, JobPhase, JobRecord, Node
from cavvy.domain.ledger import LedgerLine, LedgerSubject, LedgerSum, MonthDiscounts
from cavvy.domain.machines import NamedMachine
from cavvy.domain.markets import MarketTally, Observation
from cavvy.domain.policies import BoundPolicy, PolicyBook, ProjectPolicy
from cavvy.domain.services import read_dashed
from cavvy.domain.units import Money
from cavvy.store import accounts, ledger
from cavvy.store.accounts import SqlArchive, SqlSignIns, in_projects
from cavvy.store.announcements import tell
from cavvy.store.arrays import NewJob, SqlArrays
from cavvy.store.audit import PENDING, append, read_records, recorded
from cavvy.store.base import (
    PER_MACHINE,
    AtomicWrite,
    JobReading,
    LedgerFilter,
    ProjectFilter,
    RankReading,
    Recipe,
    RowNotFound,
    SealedSecret,
    StaleVersion,
    StoreError,
    StoreUnusable,
    SummaryPage,
    make_page,
)
from cavvy.store.budgets import SqlBudgets
from cavvy.store.dependencies import SqlDependencies
from cavvy.store.documents import to_micros, to_time
from cavvy.store.drivers import (
    DatabaseDriver,
    DatabaseSession,
    RunTransaction,
    make_driver,
    translating,
)
from cavvy.store.ended_jobs import EndedJobs
from cavvy.store.figures import SqlFigures
from cavvy.store.held import HeldReader
from cavvy.store.job_search import (
    FoundJobs,
    JobSearch,
    add_replicas,
    count_replicas,
    find_condition,
    find_order,
)
from cavvy.store.leases import FENCE, begin_fenced
from cavvy.store.maintenance import SqlMaintenance
from cavvy.store.meters import SqlMeters
from cavvy.store.named_rows import SqlNodePools
from cavvy.store.own_tables import list_left_out, list_own_rows, list_tables_with_snapshots
from cavvy.store.prepared import Row
from cavvy.store.queue import READY, TURN, SqlQueue
from cavvy.store.retention import SqlRetention
from cavvy.store.rows import (
    ALLOCATIONS,
    ATTEMPTS,
    CHARGES,
    CHECKPOINTS,
    EVENTS,
    HOSTS,
    MACHINES,
    NODES,
    OBSERVATIONS,
    RECIPES,
    SECRETS,
    SUMMARIES,
    TALLIES,
    DocumentCache,
    RowCodec,
    RowReader,
)
from cavvy.store.secrets import SqlCredentials
from cavvy.store.submissions import SubmissionGroup, insert_together
from cavvy.store.workers import StoreWorkers
from cavvy.store.writes import insert_job, remove_job, save_checkpoint, write_changes

_T = TypeVar("_T")
# maximum number of writes in one SQLite transaction; with more, the first write would be delayed
_GROUP = 64
_AT_ONCE = 1000  # jobs that are read by their IDs in one statement
_LIVE = ", ".join(f"'{phase}'" for phase in JobPhase if phase not in JOB_ENDS)
_ON_MACHINES, _IN_POOLS = (
    "AND j.id IN (SELECT id FROM (SELECT id,"
    f" ROW_NUMBER() OVER (PARTITION BY project, {line} ORDER BY {TURN}, id) AS place"
    f" FROM jobs WHERE {READY} AND {line} IS NOT NULL) AS p1 WHERE place <= ?)"
    f" ORDER BY {TURN}, j.id"
    for line in ("machine", "pool")
)
_BY_NUMBER = "WHERE job_id = ? ORDER BY number"
# attempts, each with rank -1 and before its nodes, in one statement
_NODES_OF = "SELECT {}n.rank, n.document FROM attempts a JOIN nodes n ON n.attempt_id = a.id WHERE"
_OF_JOB = (
    "SELECT number, -1, document FROM attempts WHERE job_id = ? UNION ALL "
    f"{_NODES_OF.format('a.number, ')} a.job_id = ? AND a.phase <> 'ended' ORDER BY 1, 2"
)
_OF_GANG = (
    "SELECT -1, document FROM attempts WHERE gang = ? UNION ALL "
    f"{_NODES_OF.format('')} a.gang = ? AND {{}} ORDER BY 1"
)
_RANKS = (
    "SELECT n.attempt_id, n.rank, n.document, a.phase, a.version, j.version FROM nodes n"
    " JOIN attempts a ON a.id = n.attempt_id JOIN jobs j ON j.id = a.job_id WHERE n.attempt_id"
)
_RANKS_AT_ONCE = 256  # attempts whose ranks are read in one statement
_WITH_GANG = "AND j.id = (SELECT job_id FROM attempts WHERE gang = ?)"
# not sorted by the database, which would then read all attempts instead of an index of open ones
_UNFINISHED = (
    f"SELECT id FROM jobs WHERE phase IN ({_LIVE})",
    "SELECT job_id FROM attempts WHERE phase <> 'ended'",
)
_WITH_SNAPSHOTS = ("documents", "job_arrays")


def _new_id() -> str:
    return secrets.token_hex(16)


class ProjectJobs(NamedTuple):
    """How many jobs of a project are in a phase, and when the oldest was submitted; None if they
    have ended."""

    project: str
    phase: JobPhase
    jobs: int
    since: datetime | None


class Store:
    """A store of jobs and of the rows that belong to jobs. Methods that read rows of one project
    take the project's name; methods that list rows of several projects take a ProjectFilter. `url`
    is sqlite:///path or postgresql+psycopg://user@host/name; see `open_store`.
    """

    def __init__(
        self,
        url: str,
        *,
        journal: str = "auto",
        make_id: Callable[[], str] = _new_id,
    ) -> None:
        if journal not in ("auto", "wal", "delete"):
            raise StoreUnusable(f"journal is {journal!r}; expected auto, wal or delete")
        self._url = url
        self._journal = journal
        self._make_id = make_id
        self._documents = DocumentCache()
        self._readers: StoreWorkers | None = None
        self._writers: StoreWorkers | None = None
        self._held = HeldReader()
        self.ended_jobs = EndedJobs(self._read)
        database = self._read, self._write
        self.sign_ins, self.budgets = SqlSignIns(*database), SqlBudgets(*database)
        self.meters = SqlMeters(*database)
        self.provider_credentials = SqlCredentials(*database)
        self.archive = SqlArchive(*database)
        self.queue = SqlQueue(*database, self._held, self._read_brief)
        self.retention = SqlRetention(*database)
        self.arrays, self.figures = SqlArrays(*database), SqlFigures(*database)
        self.dependencies = SqlDependencies(self._read_brief)
        self.node_pools, self.maintenance = (
            SqlNodePools(*database),
            SqlMaintenance(self._read_brief, self._write),
        )
        self._submissions: SubmissionGroup | None = None  # only with PostgreSQL

    @property
    def database(self) -> tuple[RunTransaction, RunTransaction]:
        """The functions that run a capability's reads and writes, each in a transaction."""
        return self._read, self._write

    async def list_left_out(self) -> Sequence[str]:
        """Return what has tables with rows here, but is not installed; see `list_left_out`."""
        return await self._read(list_left_out)

    async def announce(self, announcement: Announcement) -> None:
        """Tell the capabilities of something of which people may want to be notified."""
        await self._write(lambda session: tell(session, [announcement]))

    async def open(self) -> None:
        """Create or migrate the schema. Raises StoreUnusable."""
        driver = await asyncio.to_thread(self._prepare)
        self._readers = StoreWorkers(driver, count=2 if driver.is_sqlite else 4)
        self._writers = (
            StoreWorkers(driver, count=1, group=_GROUP)
            if driver.is_sqlite
            else StoreWorkers(driver, count=4, group=1)
        )
        if not driver.is_sqlite:
            self._submissions = SubmissionGroup(self._writers.do)

    def _prepare(self) -> DatabaseDriver:
        from cavvy.store.migrate import prepare

        driver = make_driver(self._url, journal=self._journal)
        with translating(driver):
            return prepare(driver, self._make_id)

    async def close(self) -> None:
        # writers last, since the last connection that closes empties the WAL
        for workers in (self._readers, self._writers):
            if workers is not None:
                await asyncio.to_thread(workers.close)

    async def _read(self, work: Callable[[DatabaseSession], _T]) -> _T:
        if self._readers is None:
            raise StoreUnusable("the store is not open")
        return await self._readers.do(work)

    async def _read_brief(self, work: Callable[[DatabaseSession], _T]) -> _T:
        """Run a read of few rows; see `StoreWorkers.do_brief`."""
        readers = self._readers
        return await (self._read(work) if readers is None else readers.do_brief(work))

    async def _write(self, work: Callable[[DatabaseSession], _T]) -> _T:
        """Run a write as one transaction, together with the audit record of its request."""
        pending = PENDING.get()
        entry = None if pending is None else pending.claim()
        if pending is None or entry is None:
            return await self._transact(work)
        try:
            return await self._transact(recorded(work, entry))
        except Exception:
            pending.give_back()
            raise

    async def _transact(self, work: Callable[[DatabaseSession], _T]) -> _T:
        if self._writers is None:
            raise StoreUnusable("the store is not open")
        fence = FENCE.get()
        if fence is None:
            return await self._writers.do(work)
        return await self._writers.do(work, partial(begin_fenced, fence=fence))

    async def bind(self, key: str, value: str) -> str:
        """Store a value under this key if the key has none, and return the stored value."""
        sql = 'INSERT INTO meta ("key", value) VALUES (?, ?) ON CONFLICT DO NOTHING'
        await self._change(sql, key, value)
        return str(await self._value('SELECT value FROM meta WHERE "key" = ?', key))

    async def _rows(self, sql: str, *values: object) -> list[Row]:
        return await self._read(lambda session: session.run(sql, values).fetchall())

    async def _few(
        self, of: RowReader[_T] | RowCodec[_T], then: str, *values: object
    ) -> Sequence[_T]:
        """Return the same as `_all`, for reads of few rows."""
        sql = f"{of.select} {then}"
        rows = await self._read_brief(lambda session: session.run(sql, values).fetchall())
        return [of.make(row) for row in rows]

    async def _all(
        self, of: RowReader[_T] | RowCodec[_T], then: str, *values: object
    ) -> Sequence[_T]:
        return [of.make(row) for row in await self._rows(f"{of.select} {then}", *values)]

    async def _one(
        self, missing: str, of: RowReader[_T] | RowCodec[_T], then: str, *values: object
    ) -> _T:
        for found in await self._few(of, then, *values):
            return found
        raise RowNotFound(missing)

    async def _value(self, sql: str, *values: object) -> Any:
        """Return the value of the only column of the first row."""
        return (await self._rows(sql, *values))[0][0]

    async def _next(self, sql: str, *values: object) -> Any:
        """Return the same as `_value`, for a read of few rows."""
        rows = await self._read_brief(lambda session: session.run(sql, values).fetchall())
        return rows[0][0]

    async def _change(self, sql: str, *values: object) -> int:
        """Run a statement and return the number of rows that it changed."""
        return await self._write(lambda session: session.run(sql, values).rowcount)

    async def _change_or(self, nothing: StoreError, sql: str, *values: object) -> None:
        """Run a statement. If the statement changes no row, roll back and raise the error
        `nothing`.
        """
        await self._write(lambda session: session.change_or(nothing, sql, values))

    async def installation(self) -> str:
        """Return the random ID of this installation. It never changes."""
        return str(await self._value("SELECT value FROM meta WHERE key = 'installation'"))

    async def fact(self, key: str) -> str | None:
        """Return a fact of the installation, or None if it is not stored."""
        rows = await self._rows('SELECT value FROM meta WHERE "key" = ?', key)
        return str(rows[0][0]) if rows else None

    async def put_fact(self, key: str, value: str) -> None:
        """Store a fact of the installation, or replace it."""
        sql = 'INSERT INTO meta ("key", value) VALUES (?, ?) ON CONFLICT ("key") DO UPDATE SET '
        await self._change(f"{sql} value = EXCLUDED.value", key, value)

    # Jobs

    async def commit(self, changes: AtomicWrite) -> None:
        """Write all rows or none. Raises StaleVersion, RowNotFound, NameConflict,
        AllocationConflict, StoreFull.
        """
        written = await self._write(
            lambda session: write_changes(session, changes, self._documents)
        )
        self._held.note(changes)
        self.ended_jobs.note(job.id for job in changes.jobs)
        for row in written:
            if row.documents:
                self._documents.keep(row.job.id, row.job.version, row.job.task, row.job.origin)

    async def submit(self, job: JobRecord, event: Event) -> JobRecord:
        """Insert a new job under `job.name` or, if that name is in use, under the first free name
        of NAME-2, NAME-3 and so on. Return the job as stored. Raises DependencyMissing.
        """
        apart = job.after or job.array_id
        if self._submissions is None or FENCE.get() is not None or apart:
            stored = await self._write(lambda session: insert_job(session, job, event))
        else:
            stored = await self._submissions.submit(job, event)
        self._documents.keep(stored.id, stored.version, stored.task, stored.origin)
        return stored

    async def submit_all(self, jobs: Sequence[NewJob]) -> Sequence[str]:
        """Insert several new jobs and arrays of jobs, or none of them, and return the names under
        which they are stored. Otherwise like `submit`. A job that waits for another of them, by its
        ID, comes after it.
        """
        return await self._write(lambda session: insert_together(session, jobs))

    async def job(self, job_id: str) -> JobRecord:
        return await self._one(f"no job {job_id}", self._documents.jobs, "AND j.id = ?", job_id)

    async def read_job(self, job_id: str) -> JobReading:
        """Return the job, its attempts sorted by number, and the nodes of those that have not
        ended, read in this order in one step. Raises RowNotFound.
        """

        def read(session: DatabaseSession) -> JobReading:
            of = self._documents.jobs
            by_id = f"{of.select} AND j.id = ?"
            owner, others = session.run_all([(by_id, (job_id,)), (_OF_JOB, (job_id, job_id))])
            row = owner.fetchone()
            if row is None:
                raise RowNotFound(f"no job {job_id}")
            job = of.make(row)
            attempts: list[Attempt] = []
            nodes: dict[str, list[Node]] = {}
            for _, rank, document in others.fetchall():
                if rank >= 0:
                    nodes[attempts[-1].id].append(NODES.make((document,)))
                    continue
                attempts.append(ATTEMPTS.make((document,)))
                if attempts[-1].phase is not AttemptPhase.ENDED:
                    nodes[attempts[-1].id] = []
            return JobReading(job=job, attempts=attempts, nodes=nodes)

        return await self._read_brief(read)

    async def read_gang(self, gang: str, ranks: Collection[int] | None = None) -> JobReading:
        """Return the attempt with this gang, its nodes or only those with these ranks, and its job,
        read in this order in one step. Raises RowNotFound if there is no such gang.
        """

        def read(session: DatabaseSession) -> JobReading:
            values = [*(ranks or ())]
            # as few different statements as possible: a connection prepares each of them
            values += values[-1:] * ((1 << (len(values) - 1).bit_length()) - len(values))
            where = "TRUE" if ranks is None else f"n.rank IN ({', '.join('?' * len(values))})"
            of = self._documents.jobs
            by_gang = f"{of.select} {_WITH_GANG}"
            parts, owner = session.run_all(
                [(_OF_GANG.format(where), (gang, gang, *values)), (by_gang, (gang,))]
            )
            found, row = parts.fetchall(), owner.fetchone()
            if not found or row is None:
                raise RowNotFound(f"no attempt has the gang {gang}")
            attempt = ATTEMPTS.make(found[0][1:])
            nodes = [NODES.make(row[1:]) for row in found[1:]]
            return JobReading(job=of.make(row), attempts=[attempt], nodes={attempt.id: nodes})

        return await self._read_brief(read)

    async def read_ranks(
        self, ranks: Collection[tuple[str, int]]
    ) -> Mapping[tuple[str, int], RankReading]:
        """Return the rows of those of these ranks that exist, each by its attempt's ID and rank."""
        attempts = sorted({attempt for attempt, _ in ranks})
        found: dict[tuple[str, int], RankReading] = {}
        for start in range(0, len(attempts), _RANKS_AT_ONCE):
            part = attempts[start : start + _RANKS_AT_ONCE]
            part += part[-1:] * ((1 << (len(part) - 1).bit_length()) - len(part))
            sql = f"{_RANKS} IN ({', '.join('?' * len(part))})"
            for attempt, rank, document, phase, *versions in await self._rows(sql, *part):
                if (attempt, rank) in ranks:
                    node = NODES.make((document,))
                    found[attempt, rank] = RankReading(node, AttemptPhase(phase), *versions)
        return found

    async def find_jobs(self, job_ids: Sequence[str]) -> Sequence[JobRecord]:
        """Return those of the jobs that exist, in this order."""
        by_id: dict[str, JobRecord] = {}
        for start in range(0, len(job_ids), _AT_ONCE):
            part = job_ids[start : start + _AT_ONCE]
            where = f"AND j.id IN ({', '.join('?' * len(part))})"
            found = await self._all(self._documents.jobs, where, *part)
            by_id |= {job.id: job for job in found}
        return [by_id[each] for each in job_ids if each in by_id]

    async def find_job(self, project: str, name_or_id: str) -> JobRecord:
        """Return the job of this project that has exactly this name or ID, or else the replica
        that `name_or_id` means as SERVICE-NUMBER. A job of an array has no such second name, which
        may be that of another array. Raises RowNotFound.
        """
        missing = f"project {project} has no job named {name_or_id}"
        replica = read_dashed(name_or_id)
        tries = [
            ("j.name", name_or_id),
            ("j.id", name_or_id),
            *([("j.array_id IS NULL AND j.name", replica)] if replica else []),
        ]
        for column, value in tries:
            where = f"AND j.project = ? AND {column} = ?"
            with suppress(RowNotFound):
                return await self._one(missing, self._documents.jobs, where, project, value)
        raise RowNotFound(missing)

    async def list_jobs(
        self,
        project: ProjectFilter,
        phases: Collection[JobPhase] = (),
        cursor: str | None = None,
        limit: int = 50,
        *,
        arrays: bool = False,
    ) -> SummaryPage:
        """Return a page of jobs, without the members of arrays if `arrays` is set."""
        sql, values = _listing(project, phases, cursor, limit + 1, arrays=arrays)
        found = [SUMMARIES.make(row) for row in await self._rows(sql, *values)]
        return make_page(found, limit)

    async def ended_since(self, since: datetime, limit: int) -> Sequence[str]:
        """Return the ids of the jobs that have ended since then, the first one first."""
        sql = (
            "SELECT id FROM jobs WHERE removed IS NULL AND ended_at >= ? ORDER BY ended_at LIMIT ?"
        )
        return [row[0] for row in await self._rows(sql, to_micros(since), limit)]

    async def search_jobs(self, search: JobSearch, now: datetime) -> FoundJobs:
        """Return a page of the jobs that a search finds, and the number of all of them."""
        where, values = find_condition(search)
        total = (await self._rows(f"SELECT COUNT(*) FROM jobs WHERE {where}", *values))[0][0]
        sql = f"{SUMMARIES.select} WHERE {where} {find_order(search, now)} LIMIT ? OFFSET ?"
        rows = await self._rows(sql, *values, search.limit, search.offset)
        jobs = [SUMMARIES.make(row) for row in rows]
        arrays = await self.arrays.find_of([each.id for each in jobs]) if search.arrays else {}
        counting, given = count_replicas(search, jobs) if search.arrays else ("", ())
        services = add_replicas(jobs, await self._rows(counting, *given)) if counting else {}
        return FoundJobs(jobs=jobs, total=total, arrays=arrays, services=services)

    async def count_jobs(
        self, project: ProjectFilter, phases: Collection[JobPhase] = ()
    ) -> dict[JobPhase, int]:
        """Return the number of jobs in each of these phases or, without `phases`, in all phases."""
        where, values = in_projects("project", project)
        if phases:
            where += f" AND phase IN ({', '.join('?' * len(phases))})"
            values = (*values, *map(str, phases))
        counted = f"SELECT phase, COUNT(*) FROM jobs WHERE removed IS NULL AND {where}"
        counted += " GROUP BY phase"
        return {JobPhase(phase): count for phase, count in await self._rows(counted, *values)}

    async def count_by_project(self, phases: Collection[JobPhase]) -> Sequence[ProjectJobs]:
        """Return the number of jobs of each project in each of these phases that has any."""
        marks = ", ".join("?" * len(phases))
        sql = (
            "SELECT project, phase, COUNT(*), MIN(submitted_at) FROM jobs "
            f"WHERE removed IS NULL AND phase IN ({marks}) GROUP BY project, phase"
        )
        return [
            ProjectJobs(project, JobPhase(phase), jobs, to_time(since))
            for project, phase, jobs, since in await self._rows(sql, *sorted(phases))
        ]

    async def waiting(
        self, now: datetime, chosen: Sequence[str] = (), per_machine: int = PER_MACHINE
    ) -> Sequence[JobRecord]:
        """Return those of the chosen jobs that still wait, in their order, and then the jobs that
        wait for machines or pools, at most `per_machine` of each, sorted by priority and age.
        """
        of, values = self._documents.jobs, (to_micros(now), per_machine)
        marks = ", ".join("?" * len(chosen))
        picked = f"AND j.id IN ({marks}) AND phase = 'queued' AND stop_reason IS NULL"
        parts: list[tuple[str, Sequence[object]]] = [
            (f"{of.select} {_ON_MACHINES}", values),
            (f"{of.select} {_IN_POOLS}", values),
        ]
        if chosen:
            parts.append((f"{of.select} {picked}", chosen))
        in_lines, in_pools, *others = await self._read_brief(
            lambda session: [each.fetchall() for each in session.run_all(parts)]
        )
        by_id = {job.id: job for rows in others for job in map(of.make, rows)}
        first = [by_id[each] for each in chosen if each in by_id]
        return [*first, *map(of.make, in_lines), *map(of.make, in_pools)]

    async def next_waiting(self, now: datetime) -> datetime | None:
        """Return the earliest `not_before` after `now` among queued jobs, or None."""
        sql = (
            "SELECT MIN(not_before) FROM jobs WHERE phase = 'queued' AND stop_reason IS NULL AND "
            "not_before > ?"
        )
        micros = await self._next(sql, to_micros(now))
        return None if micros is None else to_time(micros)

    async def snapshots(self) -> Collection[str]:
        """Return the content hashes of the working-folder snapshots of all jobs, and of what
        capabilities keep. Garbage collection must keep the blobs of these snapshots.
        """
        sql = " UNION ".join(
            f"SELECT DISTINCT snapshot FROM {table} WHERE snapshot IS NOT NULL"
            for table in (*_WITH_SNAPSHOTS, *list_tables_with_snapshots())
        )
        found = {row[0] for row in await self._rows(sql)}
        return found.union(*[await own.snapshots() for own in list_own_rows(self.database)])

    async def unfinished(self) -> Sequence[str]:
        """Return the IDs of the jobs that have not ended or have an unfinished attempt."""

        def read(session: DatabaseSession) -> set[str]:
            return {row[0] for sql in _UNFINISHED for row in session.run(sql).fetchall()}

        return sorted(await self._read(read))

    async def elastic_jobs(self) -> Sequence[JobRecord]:
        """Return the jobs with a range of nodes that have not ended."""
        then = f"AND j.phase IN ({_LIVE}) AND d.task LIKE ? ORDER BY j.id"
        return await self._all(self._documents.jobs, then, '%"elastic":{"least":%')

    async def live_versions(self) -> dict[str, int]:
        """Return the version of each job that has not ended, by job ID."""
        sql = f"SELECT id, version FROM jobs WHERE phase IN ({_LIVE})"
        return {job_id: version for job_id, version in await self._rows(sql)}

    # Attempts, nodes and their events

    async def attempts(self, job_id: str) -> Sequence[Attempt]:
        return await self._few(ATTEMPTS, _BY_NUMBER, job_id)

    async def attempt_of_gang(self, gang: str) -> Attempt:
        """Return the attempt with this gang. Raises RowNotFound."""
        return await self._one(f"no attempt has the gang {gang}", ATTEMPTS, "WHERE gang = ?", gang)

    async def open_attempts(self, project: ProjectFilter = None) -> Sequence[Attempt]:
        """Return all attempts that have not ended, and therefore may cost money now."""
        where, values = in_projects("project", project)
        return await self._all(ATTEMPTS, f"WHERE phase <> 'ended' AND {where} ORDER BY id", *values)

    async def attempts_with_gpus(
        self, project: ProjectFilter, since: datetime, limit: int
    ) -> Sequence[Attempt]:
        """Return the newest attempts with GPUs of the jobs that have not ended, or have ended since
        then."""
        where, values = in_projects("project", project)
        jobs = f"SELECT id FROM jobs WHERE {where} AND (phase IN ({_LIVE}) OR ended_at >= ?)"
        ordered = f"WHERE job_id IN ({jobs}) AND document LIKE ? ORDER BY id DESC LIMIT ?"
        given = (*values, to_micros(since), '%"accelerator":"%', limit)
        return await self._all(ATTEMPTS, ordered, *given)

    async def kept_attempts(self) -> Sequence[Attempt]:
        # the first condition lets the databases use an index that has few rows
        """Return all attempts whose gangs are kept warm for other jobs."""
        return await self._few(ATTEMPTS, "WHERE phase <> 'ended' AND phase = 'kept' ORDER BY id")

    async def gang_spent(self, gang: str) -> Money:
        """Return the total charges for the gang with this name, over all attempts that used the
        gang."""
        sql = (
            "SELECT CAST(COALESCE(SUM(c.amount), 0) AS BIGINT) FROM attempts a JOIN charges c "
            "ON c.attempt_id = a.id WHERE a.bought_as = ?"
        )
        return Money(await self._value(sql, gang))

    async def machine(self, project: str, name: str) -> NamedMachine:
        """Return the machine with this name. Raises RowNotFound."""
        missing = f"project {project} has no machine named {name}"
        return await self._one(missing, MACHINES, "WHERE project = ? AND name = ?", project, name)

    async def machines(self, project: ProjectFilter = None) -> Sequence[NamedMachine]:
        """Return the machines, sorted by project and name."""
        where, values = in_projects("project", project)
        return await self._all(MACHINES, f"WHERE {where} ORDER BY project, name", *values)

    async def jobs_of_machine(self, project: str, name: str) -> Sequence[str]:
        """Return the IDs of the machine's unfinished jobs, oldest first."""
        sql = (
            f"SELECT id FROM jobs WHERE project = ? AND machine = ? AND phase IN ({_LIVE})"
            " ORDER BY id"
        )
        return [job_id for (job_id,) in await self._rows(sql, project, name)]

    async def delete_machine(self, machine: NamedMachine) -> None:
        """Delete a machine's row. Raises StaleVersion."""
        sql = "DELETE FROM machines WHERE project = ? AND name = ? AND version = ?"
        stale = StaleVersion(f"machine {machine.name} has changed")
        await self._change_or(stale, sql, machine.project, machine.name, machine.version)

    async def nodes(self, attempt_id: str) -> Sequence[Node]:
        """Return the nodes of an attempt, sorted by rank."""
        return await self._few(NODES, "WHERE attempt_id = ? ORDER BY rank", attempt_id)

    async def open_nodes(self, project: ProjectFilter = None) -> Sequence[Node]:
        """Return the nodes of all attempts that have not ended."""
        where, values = in_projects("project", project)
        open_ones = f"SELECT id FROM attempts WHERE phase <> 'ended' AND {where}"
        return await self._all(NODES, f"WHERE attempt_id IN ({open_ones})", *values)

    async def node(self, attempt_id: str, rank: int) -> Node:
        missing = f"attempt {attempt_id} has no rank {rank}"
        return await self._one(
            missing, NODES, "WHERE attempt_id = ? AND rank = ?", attempt_id, rank
        )

    async def events(self, job_id: str, after: int = 0, limit: int = 1000) -> Sequence[Event]:
        """Return the events with an id above `after`, oldest first."""
        then = "WHERE job_id = ? AND id > ? ORDER BY id LIMIT ?"
        return await self._all(EVENTS, then, job_id, after, limit)

    async def charges(self, job_id: str) -> Sequence[Charge]:
        """Return the job's charges, sorted by attempt in the order of their numbers, rank and
        time."""
        then = "WHERE job_id = ? ORDER BY attempt_id, rank, since, kind"
        found = await self._few(CHARGES, then, job_id)
        sql = "SELECT id, number FROM attempts WHERE job_id = ?"
        rows = await self._rows(sql, job_id) if found else ()
        numbers = {attempt_id: int(number) for attempt_id, number in rows}
        return sorted(found, key=lambda each: numbers.get(each.attempt_id, 0))

    async def spent(self, project: str, since: datetime | None = None) -> Money:
        """Return the sum of the project's entries in the ledger. If `since` is given, only entries
        at `since` or later are counted.
        """
        if since is None:
            return Money(await self._value(ledger.TOTAL, project))
        sums = await self.sum_ledger(LedgerFilter(projects=project, since=since), ())
        return sums[0].amount if sums else Money()

    async def sum_ledger(self, which: LedgerFilter, by: Sequence[str]) -> Sequence[LedgerSum]:
        """Return the sums of the ledger's entries for each combination of values of the dimensions
        `by`, the largest sum first. If an entry extends beyond the period, only its part inside the
        period is counted. `by` contains names of `ledger.DIMENSIONS`, month, tags (as JSON) or
        tag:NAME.
        """
        return await self._read(lambda session: ledger.add_up(session, which, by))

    async def open_subjects(self, attempts: Collection[str]) -> Mapping[str, LedgerSubject]:
        """Return the subjects that the ledger's entries of these attempts have or will have, by the
        IDs of the attempts. Attempts that do not exist are omitted.
        """
        return await self._read(lambda session: ledger.read_open_subjects(session, attempts))

    async def ledger_lines(
        self, which: LedgerFilter, *, after: int = 0, limit: int = 1000
    ) -> Sequence[LedgerLine]:
        """Return the entries that overlap the period and whose number is above `after`, sorted by
        number.
        """
        return await self._read(
            lambda session: ledger.read_lines(session, which, after=after, limit=limit)
        )

    async def post_discounts(self, discounts: MonthDiscounts) -> int:
        """Post the total amount of each discount in a month. If an amount was posted earlier, only
        the difference is added to the ledger. If an earlier posting is for a discount that
        `discounts` does not contain, the posting is reversed. Returns the number of new entries.
        Raises RowNotFound.
        """
        return await self._write(lambda session: ledger.post_discounts(session, discounts))

    async def remove_job(self, job: JobRecord) -> None:
        """Delete an ended job with its events, nodes and checkpoints. The job's charges are kept,
        and its name can be used again. Raises StaleVersion.
        """
        await self.remove_jobs([job])

    async def remove_jobs(self, jobs: Sequence[JobRecord]) -> None:
        """Do the same for several jobs, all or none of them."""

        def remove(session: DatabaseSession) -> None:
            for job in jobs:
                remove_job(session, job)

        await self._write(remove)
        self.ended_jobs.note(job.id for job in jobs)

    # Checkpoints

    async def save_checkpoint(
        self, checkpoint: SavedCheckpoint, *, on_behalf: int, keep: int = 2
    ) -> SavedCheckpoint:
        """Store a checkpoint as the job's newest checkpoint, and return it with its number. Only
        the newest `keep` checkpoints of the job are kept.

        If the checkpoint is already the newest checkpoint (same attempt and manifest), nothing
        changes. `on_behalf` is the number of the attempt that made the checkpoint. Raises
        RowNotFound if the project does not have this job. Raises StaleVersion if the job has begun
        an attempt after the attempt `on_behalf`.
        """
        return await self._write(
            lambda session: save_checkpoint(session, checkpoint, on_behalf, keep)
        )

    async def checkpoints(self, job_id: str) -> Sequence[SavedCheckpoint]:
        """Return the job's checkpoints, newest first."""
        return await self._all(CHECKPOINTS, "WHERE job_id = ? ORDER BY number DESC", job_id)

    async def forget_checkpoints(self, job_id: str) -> None:
        """Delete the rows of the job's checkpoints. The caller must delete the files."""
        await self._change("DELETE FROM checkpoints WHERE job_id = ?", job_id)

    # Markets

    async def observations(
        self, markets: Collection[str], since: datetime, limit: int = 2000
    ) -> Sequence[Observation]:
        """Return the observations of these markets at `since` or later, oldest first. If there are
        more than `limit` rows, only the newest rows are returned.
        """
        if not markets:
            return []
        marks = ", ".join("?" * len(markets))
        then = f"WHERE market IN ({marks}) AND at >= ? ORDER BY at DESC, id DESC LIMIT ?"
        values = (*sorted(markets), to_micros(since), limit)
        return (await self._all(OBSERVATIONS, then, *values))[::-1]

    async def tallies(self, since: datetime) -> Sequence[MarketTally]:
        """Return the sums of the observations that were made at `since` or later. Observations of
        prices are left out. The result has one sum for each market and kind, sorted by market and
        then by kind.
        """
        then = "WHERE at >= ? AND kind <> 'price' GROUP BY market, kind ORDER BY market, kind"
        return await self._all(TALLIES, then, to_micros(since))

    async def forget_observations(self, before: datetime) -> None:
        await self._change("DELETE FROM observations WHERE at < ?", to_micros(before))

    # Hosts, allocations and secrets

    async def put_host(self, host: Host) -> None:
        """Insert or replace the host. The host's allocations are kept, even if they no longer
        fit."""
        await self._change(HOSTS.upsert, *HOSTS.values(host))

    async def hosts(self) -> Sequence[Host]:
        return await self._all(HOSTS, "ORDER BY name")

    async def allocations(self, host: str | None = None) -> Sequence[Allocation]:
        """Return the allocations on one host or on all hosts, sorted by host, gang and rank."""
        if host is None:
            return await self._read(self._held.read_allocations)
        return await self._all(ALLOCATIONS, "WHERE host = ? ORDER BY gang, rank", host)

    async def allocations_of(self, gang: str) -> Sequence[Allocation]:
        """Return the allocations of one gang, sorted by rank."""
        return await self._few(ALLOCATIONS, "WHERE gang = ? ORDER BY rank", gang)

    async def put_recipe(self, recipe: Recipe) -> None:
        await self._change(RECIPES.upsert, *RECIPES.values(recipe))

    async def recipes(self, project: str) -> Sequence[Recipe]:
        return await self._all(RECIPES, "WHERE project = ? ORDER BY name", project)

    async def delete_recipe(self, project: str, name: str) -> None:
        """Delete a recipe. Raises RowNotFound."""
        missing = RowNotFound(f"project {project} has no recipe named {name}")
        await self._change_or(missing, RECIPES.delete, project, name)

    async def put_secret(self, secret: SealedSecret) -> None:
        await self._change(SECRETS.upsert, *SECRETS.values(secret))

    async def secrets(self, project: str) -> Sequence[SealedSecret]:
        return await self._all(SECRETS, "WHERE project = ? ORDER BY name", project)

    async def all_secrets(self) -> Sequence[SealedSecret]:
        """Return the secrets of all projects, sorted by project and name."""
        return await self._all(SECRETS, "ORDER BY project, name")

    async def reseal_secret(self, secret: SealedSecret, sealed: bytes) -> bool:
        """Replace the encrypted value of a secret. Return False if the stored value is no longer
        `secret.sealed`.
        """
        owner = secret.project, secret.name, secret.sealed
        return await self._change(SECRETS.reseal, sealed, *owner) > 0

    async def delete_secret(self, project: str, name: str) -> None:
        """Delete a secret. Raises RowNotFound."""
        missing = RowNotFound(f"project {project} has no secret named {name}")
        await self._change_or(missing, SECRETS.delete, project, name)

    # The audit log

    async def record(self, entry: AuditEntry) -> ChainHead:
        """Append a record to the audit log, and return the new end of the chain."""
        return await self._write(lambda session: append(session, entry))

    async def audit_records(
        self,
        projects: ProjectFilter = None,
        *,
        account: str | None = None,
        outcome: AuditOutcome | None = None,
        since: datetime | None = None,
        after: int = 0,
        limit: int = 1000,
        newest: bool = False,
    ) -> Sequence[SealedRecord]:
        """Return at most `limit` records of the audit log whose number is larger than `after`,
        sorted by number: the oldest records or, if `newest` is set, the newest records.
        """
        return await self._read(
            lambda session: read_records(
                session,
                projects,
                account=account,
                outcome=outcome,
                since=since,
                after=after,
                limit=limit,
                newest=newest,
            )
        )

    # Accounts

    async def credential(self, digest: str) -> AccountCredential | None:
        """Return the token whose SHA-256 in hexadecimal is `digest`, with its account and roles."""
        return await self._read_brief(lambda session: accounts.read_credential(session, digest))

    async def use_token(self, token_id: str, at: datetime) -> None:
        """Record the time of a token's last use."""
        await self._change(
            "UPDATE tokens SET last_used_at = ? WHERE id = ?", to_micros(at), token_id
        )

    async def add_account(self, account: Account) -> None:
        """Raises NameConflict."""
        await self._write(lambda session: accounts.add_account(session, account))

    async def accounts(self) -> Sequence[Account]:
        return await self._all(accounts.ACCOUNTS, "ORDER BY name")

    async def disable_account(self, name: str, at: datetime | None) -> None:
        """Disable an account at the time `at` or, if `at` is None, enable it. Raises
        RowNotFound.
        """
        sql = "UPDATE accounts SET disabled_at = ? WHERE name = ?"
        missing = RowNotFound(f"no account {name}")
        await self._change_or(missing, sql, None if at is None else to_micros(at), name)

    async def remove_account(self, name: str) -> None:
        """Delete an account with its tokens and roles. Raises RowNotFound."""
        await self._write(lambda session: accounts.remove_account(session, name))

    async def add_token(self, token: AccountToken, digest: str) -> None:
        """Store a token by its hash. Raises RowNotFound if the token's account does not exist."""
        await self._write(lambda session: accounts.add_token(session, token, digest))

    async def tokens(self, account: str | None = None) -> Sequence[AccountToken]:
        """Return the tokens of one account or of all accounts, including expired and revoked
        tokens."""
        where, values = _if_given("account", account)
        return await self._all(accounts.TOKENS, f"WHERE {where} ORDER BY account, id", *values)

    async def revoke_token(self, token_id: str, account: str | None, at: datetime) -> None:
        """Revoke a token. If `account` is not None, the token must belong to this account. Raises
        RowNotFound.
        """
        await self._write(lambda session: accounts.revoke_token(session, token_id, account, at))

    async def add_project(self, project: Project, *, adopt: bool) -> None:
        """Store a new project. Jobs, machines, secrets or roles may already use the project's name.
        Then `adopt` must be set, because people with a role in the parent get this role for these
        rows, too. Raises NameConflict, and RowNotFound if the parent does not exist.
        """
        await self._write(lambda session: accounts.add_project(session, project, adopt=adopt))

    async def move_project(self, former: Project, parent: str | None) -> None:
        """Move a created project below another project or, if `parent` is None, to the top. Raises
        RowNotFound if the parent does not exist, or if the project has moved since `former` was
        read. Raises NameConflict if `parent` is the project itself or a project below it.
        """
        await self._write(lambda session: accounts.move_project(session, former, parent))

    async def projects(self) -> Sequence[Project]:
        """Return all created projects, and the projects that exist only because jobs name them."""
        return await self._read(accounts.list_used_projects)

    async def policies(self) -> PolicyBook:
        """Return the policies of all projects."""
        return await self._read_brief(accounts.read_policies)

    async def policies_of(self, project: str) -> Sequence[BoundPolicy]:
        """Return the policies that apply to the jobs of a project: those of the installation, of
        the projects above this project, and of the project itself, in this order."""
        return await self._read_brief(lambda session: accounts.read_policies_of(session, project))

    async def put_policy(self, project: str, policy: ProjectPolicy | None) -> None:
        """Replace the policy of a project or of the INSTALLATION or, if `policy` is None, delete
        it.
        """
        await self._write(lambda session: accounts.put_policy(session, project, policy))

    async def grant_role(self, binding: RoleBinding) -> None:
        """Store a role; an existing role is not changed. Raises RowNotFound if the account does not
        exist.
        """
        await self._write(lambda session: accounts.grant_role(session, binding))

    async def revoke_role(self, binding: RoleBinding) -> None:
        """Delete a role. Raises RowNotFound."""
        await self._write(lambda session: accounts.revoke_role(session, binding))

    async def roles(self, project: str | None = None) -> Sequence[RoleBinding]:
        """Return the roles that were granted in this project itself or, without `project`, in all
        projects.
        """
        return await self._read(lambda session: accounts.list_roles(session, project))

    # Providers' documents

    async def provider_documents(
        self, provider: str, collection: str, name: str | None = None
    ) -> Sequence[ProviderDocument]:
        """Return the provider's documents in a collection, sorted by name."""
        where, values = ("", ()) if name is None else (" AND name = ?", (name,))
        sql = (
            "SELECT name, body, version FROM provider_state WHERE provider = ? AND collection = ?"
            f"{where} ORDER BY name"
        )
        return [
            ProviderDocument(collection=collection, name=row[0], body=row[1], version=row[2])
            for row in await self._rows(sql, provider, collection, *values)
        ]

    async def swap_provider_document(
        self, provider: str, document: ProviderDocument, *, delete: bool = False
    ) -> bool:
        """Write or delete a document, if its stored version is `document.version` - 1 (0 if it is
        not stored yet). If the stored version differs, return False and change nothing.
        """
        key = (provider, document.collection, document.name)
        body, before = document.body, document.version - 1
        where = "WHERE provider = ? AND collection = ? AND name = ? AND version = ?"
        values: tuple[object, ...] = (*key, before)
        if delete:
            sql = f"DELETE FROM provider_state {where}"
        elif before:
            sql = f"UPDATE provider_state SET body = ?, version = version + 1 {where}"
            values = (body, *values)
        else:
            sql = (
                "INSERT INTO provider_state (provider, collection, name, body, version)"
                " VALUES (?, ?, ?, ?, 1) ON CONFLICT DO NOTHING"
            )
            values = (*key, body)
        return await self._write(lambda session: session.run(sql, values).rowcount) > 0


def _if_given(column: str, value: str | int | None) -> tuple[str, tuple[str | int, ...]]:
    """Return the SQL condition that `column` has this value, and its parameters. If `value` is
    None, the condition is always true.
    """
    return ("TRUE", ()) if value is None else (f"{column} = ?", (value,))


def _listing(
    project: ProjectFilter,
    phases: Collection[JobPhase],
    cursor: str | None,
    limit: int,
    *,
    arrays: bool,
) -> tuple[str, tuple[object, ...]]:
    """Return the SQL that lists jobs, newest first, and the statement's values. The statement reads
    the index once for each phase, so that it finds jobs in a rare phase quickly among 100,000.
    """
    wanted = [phase for phase in JobPhase if phase in phases]
    own, values = in_projects("project", project)
    single = ["array_id IS NULL"] if arrays else []
    conditions = ["removed IS NULL", *single, *(["phase = ?"] if wanted else []), own]
    if cursor is not None:
        conditions, values = [*conditions, "id < ?"], (*values, cursor)
    one = f"{SUMMARIES.select} WHERE {' AND '.join(conditions)} ORDER BY id DESC LIMIT ?"
    if not wanted:
        return one, (*values, limit)
    every = [value for phase in wanted for value in (str(phase), *values, limit)]
    if len(wanted) == 1:
        return one, tuple(every)
    parts = " UNION ALL ".join(f"SELECT * FROM ({one}) AS p{i}" for i in range(len(wanted)))
    return f"{parts} ORDER BY id DESC LIMIT ?", (*every, limit)


def _read_nodes(
    session: DatabaseSession, attempt_id: str, rank: int | None = None
) -> Sequence[Node]:
    where, values = _if_given("rank", rank)
    sql = f"{NODES.select} WHERE attempt_id = ? AND {where} ORDER BY rank"
    return [NODES.make(row) for row in session.run(sql, (attempt_id, *values)).fetchall()]

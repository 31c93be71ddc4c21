"""The writes of the SQL store: what happens between BEGIN and COMMIT. Called by its writer
threads.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from cavvy.domain.allocations import Allocation
from cavvy.domain.checkpoints import SavedCheckpoint
from cavvy.domain.events import Charge, Event
from cavvy.domain.jobs import Attempt, Job, Node
from cavvy.store.allocations import check_allocation
from cavvy.store.base import (
    AllocationConflict,
    AtomicWrite,
    NameConflict,
    RowNotFound,
    StaleVersion,
)
from cavvy.store.documents import (
    check_readable,
    encode,
    plain,
    storable_attempt,
    storable_job,
    storable_node,
    to_micros,
)
from cavvy.store.drivers import DatabaseSession
from cavvy.store.rows import (
    ALLOCATION_COLUMNS,
    CHARGE_COLUMNS,
    CHECKPOINT_COLUMNS,
    HOST_COLUMNS,
    JOB_COLUMNS,
    OBSERVATION_COLUMNS,
    DocumentCache,
    charge_values,
    checkpoint_values,
    job_values,
    make_allocation,
    make_checkpoint,
    make_host,
    observation_values,
)


def _marks(columns: str) -> str:
    return ", ".join("?" for _ in columns.split(", "))


_INSERT_JOB = (
    f"INSERT INTO jobs ({JOB_COLUMNS}) VALUES ({_marks(JOB_COLUMNS)}) ON CONFLICT DO NOTHING"
)
_JOB_SET = JOB_COLUMNS.split(", ")[3:]  # id, project and name never change
_UPDATE_JOB = (
    f"UPDATE jobs SET {', '.join(f'{name} = ?' for name in _JOB_SET)}"
    " WHERE id = ? AND project = ? AND name = ? AND version = ?"
)
_INSERT_DOCUMENT = "INSERT INTO documents (job_id, task, origin, snapshot) VALUES (?, ?, ?, ?)"
_UPDATE_DOCUMENT = "UPDATE documents SET task = ?, origin = ?, snapshot = ? WHERE job_id = ?"
_NEXT_NUMBER = (
    "INSERT INTO names (project, name, last) VALUES (?, ?, 2)"
    " ON CONFLICT (project, name) DO UPDATE SET last = names.last + 1 RETURNING last"
)
_INSERT_ATTEMPT = (
    "INSERT INTO attempts (id, job_id, project, number, gang, phase, document, version)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, 1) ON CONFLICT DO NOTHING"
)
_UPDATE_ATTEMPT = (
    "UPDATE attempts SET phase = ?, gang = ?, document = ?, version = ? WHERE id = ? "
    "AND project = ? AND version = ?"
)
_INSERT_NODE = (
    "INSERT INTO nodes (attempt_id, rank, project, document, version) VALUES (?, ?, ?, "
    "?, 1) ON CONFLICT DO NOTHING"
)
_UPDATE_NODE = (
    "UPDATE nodes SET document = ?, version = ? WHERE attempt_id = ? AND rank = ? AND "
    "project = ? AND version = ?"
)
_INSERT_EVENT = (
    "INSERT INTO events (project, job_id, attempt, rank, at, kind, fact, text)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
)
_CHARGED = "SELECT amount FROM charges WHERE attempt_id = ? AND rank = ? AND kind = ? AND since = ?"
_PUT_CHARGE = (
    f"INSERT INTO charges ({CHARGE_COLUMNS}) VALUES ({_marks(CHARGE_COLUMNS)})"
    " ON CONFLICT (attempt_id, rank, kind, since)"
    " DO UPDATE SET until = excluded.until, rate = excluded.rate, amount = excluded.amount"
)
_NEWEST_CHECKPOINT = (
    f"SELECT {CHECKPOINT_COLUMNS} FROM checkpoints WHERE job_id = ? ORDER BY number DESC LIMIT 1"
)
_INSERT_CHECKPOINT = (
    f"INSERT INTO checkpoints ({CHECKPOINT_COLUMNS}) VALUES ({_marks(CHECKPOINT_COLUMNS)})"
)
_INSERT_OBSERVATION = (
    f"INSERT INTO observations ({OBSERVATION_COLUMNS}) VALUES ({_marks(OBSERVATION_COLUMNS)})"
)
_INSERT_ALLOCATION = (
    f"INSERT INTO allocations ({ALLOCATION_COLUMNS}) VALUES "
    f"({_marks(ALLOCATION_COLUMNS)}) ON CONFLICT DO NOTHING"
)
_ALLOCATION_DEVICE = (
    "INSERT INTO held_devices (host, device, gang, rank) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING"
)


@dataclass(frozen=True, slots=True)
class WrittenJob:
    """A job as it was stored, with its documents where they were written too."""

    job: Job
    documents: bool


def write_changes(
    session: DatabaseSession, changes: AtomicWrite, documents: DocumentCache
) -> Sequence[WrittenJob]:
    """All of `changes`, in the open transaction. Raises StaleVersion, NameConflict,
    AllocationConflict, RowNotFound, Mismatch.
    """
    for gang in changes.release:
        session.run("DELETE FROM allocations WHERE gang = ?", (gang,))
    jobs = changes.jobs
    if not session.driver.is_sqlite:
        jobs = sorted(jobs, key=lambda job: job.id)  # one order of locks for all writers
    written = [_write_job(session, job, documents) for job in jobs]
    for attempt in changes.attempts:
        _write_attempt(session, storable_attempt(attempt), attempt.version)
    for node in changes.nodes:
        _write_node(session, storable_node(node), node.version)
    if changes.charges:
        _write_charges(session, changes.charges)
    if changes.events:
        _write_events(session, changes.events)
    for seen in changes.observations:
        session.run(_INSERT_OBSERVATION, observation_values(seen))
    if changes.allocations:
        _write_allocations(session, changes.allocations)
    return written


def insert_job(session: DatabaseSession, job: Job, event: Event) -> Job:
    """The new job under its name or the first free number of it, with its documents and first
    event.
    """
    texts = check_readable(job)
    stored = storable_job(replace(job, version=0))
    while session.run(_INSERT_JOB, job_values(stored, 1)).rowcount == 0:
        if session.run("SELECT 1 FROM jobs WHERE id = ?", (job.id,)).fetchone():
            raise StaleVersion(f"job {job.id} exists already")
        number = session.run(_NEXT_NUMBER, (job.project, job.name)).fetchone()
        assert number is not None
        stored = replace(stored, name=f"{job.name}-{number[0]}")
    session.run(_INSERT_DOCUMENT, (job.id, *texts, job.origin.snapshot))
    _write_events(session, [event])
    return stored


def save_checkpoint(
    session: DatabaseSession, checkpoint: SavedCheckpoint, on_behalf: int, keep: int
) -> SavedCheckpoint:
    """As Store.save_checkpoint, in the open transaction."""
    lock = "" if session.driver.is_sqlite else " FOR NO KEY UPDATE"  # savers of one job take turns
    owner = (checkpoint.job_id, checkpoint.project)
    job = session.run(
        f"SELECT attempt FROM jobs WHERE id = ? AND project = ?{lock}", owner
    ).fetchone()
    if job is None:
        raise RowNotFound(f"no job {checkpoint.job_id}")
    if job[0] > on_behalf:
        raise StaleVersion(f"attempt {job[0]} of job {checkpoint.job_id} has begun")
    row = session.run(_NEWEST_CHECKPOINT, (checkpoint.job_id,)).fetchone()
    newest = make_checkpoint(row) if row else None
    if newest and (newest.attempt, newest.manifest) == (checkpoint.attempt, checkpoint.manifest):
        return newest
    stored = replace(checkpoint, number=newest.number + 1 if newest else 1)
    session.run(_INSERT_CHECKPOINT, checkpoint_values(stored))
    session.run(
        "DELETE FROM checkpoints WHERE job_id = ? AND number <= ?",
        (stored.job_id, stored.number - keep),
    )
    return stored


def _write_job(session: DatabaseSession, job: Job, documents: DocumentCache) -> WrittenJob:
    stored = storable_job(job)
    if job.version == 0:
        texts = check_readable(job)
        if session.run(_INSERT_JOB, job_values(stored, 1)).rowcount == 0:
            if session.run("SELECT 1 FROM jobs WHERE id = ?", (job.id,)).fetchone():
                raise StaleVersion(f"job {job.id} exists already")
            raise NameConflict(f"project {job.project} has a job named {job.name} already")
        session.run(_INSERT_DOCUMENT, (job.id, *texts, job.origin.snapshot))
        return WrittenJob(stored, documents=True)
    known = documents.written_at(job)
    values = job_values(stored, stored.version if known is None else known)
    guard = (job.id, job.project, job.name, job.version)
    if session.run(_UPDATE_JOB, (*values[3:], *guard)).rowcount == 0:
        raise StaleVersion(f"job {job.id} is no longer at version {job.version}")
    if known is None:
        session.run(_UPDATE_DOCUMENT, (*check_readable(job), job.origin.snapshot, job.id))
    return WrittenJob(stored, documents=known is None)


def _write_attempt(session: DatabaseSession, stored: Attempt, version: int) -> None:
    phase, document = str(stored.phase), encode(stored)
    if version:
        guard = (stored.id, stored.project, version)
        values: tuple[object, ...] = (phase, stored.gang, document, stored.version, *guard)
        done = session.run(_UPDATE_ATTEMPT, values).rowcount
    else:
        values = (
            stored.id,
            stored.job_id,
            stored.project,
            stored.number,
            stored.gang,
            phase,
            document,
        )
        done = session.run(_INSERT_ATTEMPT, values).rowcount
        session.run("UPDATE jobs SET place = ? WHERE id = ?", (stored.offer.key, stored.job_id))
    if done == 0:
        raise StaleVersion(f"attempt {stored.id} is not at version {version}")


def _write_node(session: DatabaseSession, stored: Node, version: int) -> None:
    if version:
        values: tuple[object, ...] = (
            encode(stored),
            stored.version,
            stored.attempt_id,
            stored.rank,
            stored.project,
            version,
        )
        done = session.run(_UPDATE_NODE, values).rowcount
    else:
        done = session.run(
            _INSERT_NODE, (stored.attempt_id, stored.rank, stored.project, encode(stored))
        ).rowcount
    if done == 0:
        raise StaleVersion(
            f"rank {stored.rank} of attempt {stored.attempt_id} is not at version {version}"
        )


def _write_charges(session: DatabaseSession, charges: Iterable[Charge]) -> None:
    charges = sorted(
        charges, key=lambda charge: charge.job_id
    )  # one order of locks for all writers
    locked = None
    for charge in charges:
        if charge.job_id != locked and not session.driver.is_sqlite:
            session.run("SELECT 1 FROM jobs WHERE id = ? FOR NO KEY UPDATE", (charge.job_id,))
            locked = charge.job_id
        values = charge_values(charge)
        old = session.run(_CHARGED, values[2:6]).fetchone()
        session.run(_PUT_CHARGE, values)
        more = charge.amount.micros - (old[0] if old else 0)
        if more:
            session.run("UPDATE jobs SET spent = spent + ? WHERE id = ?", (more, charge.job_id))


def _write_events(session: DatabaseSession, events: Sequence[Event]) -> None:
    if not session.driver.is_sqlite:
        # Ids are given when a row is inserted, seen when it is committed: a reader that goes on
        # after the newest id would miss an event committed late. So the writers of one job's events
        # take turns.
        for job_id in sorted({event.job_id for event in events}):
            session.run("SELECT pg_advisory_xact_lock(hashtextextended(?, 0))", (job_id,))
    for event in events:
        values = (
            event.project,
            event.job_id,
            event.attempt,
            event.rank,
            to_micros(event.at),
            str(event.kind),
            None if event.fact is None else str(event.fact),
        )
        session.run(_INSERT_EVENT, (*values, plain(event.text)))


def _write_allocations(session: DatabaseSession, allocations: Sequence[Allocation]) -> None:
    lock = "" if session.driver.is_sqlite else " FOR UPDATE"
    standing: dict[str, list[Allocation]] = {}
    hosts = {}
    for name in sorted(
        {allocation.host for allocation in allocations}
    ):  # one order of locks for all writers
        row = session.run(
            f"SELECT {HOST_COLUMNS} FROM hosts WHERE name = ?{lock}", (name,)
        ).fetchone()
        hosts[name] = make_host(row) if row else None
        rows = session.run(
            f"SELECT {ALLOCATION_COLUMNS} FROM allocations WHERE host = ?", (name,)
        ).fetchall()
        standing[name] = [make_allocation(row) for row in rows]
    for allocation in allocations:
        check_allocation(hosts[allocation.host], allocation, standing[allocation.host])
        values = (
            allocation.host,
            allocation.gang,
            allocation.rank,
            allocation.project,
            allocation.cpus,
            allocation.memory_mib,
            encode(allocation.devices),
        )
        done = session.run(_INSERT_ALLOCATION, values).rowcount
        for device in allocation.devices:
            done &= session.run(
                _ALLOCATION_DEVICE, (allocation.host, device, allocation.gang, allocation.rank)
            ).rowcount
        if done == 0:
            raise AllocationConflict(
                f"rank {allocation.rank} of gang {allocation.gang}, or one of its devices, is held "
                "already"
            )
        standing[allocation.host].append(allocation)

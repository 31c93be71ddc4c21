"""Functions that write to the database of the SQL store. The store's writer threads call the
functions in an open transaction.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType

from cavvy.domain.allocations import Allocation, Host
from cavvy.domain.checkpoints import SavedCheckpoint
from cavvy.domain.events import Charge, Event
from cavvy.domain.jobs import Attempt, JobRecord, Node
from cavvy.domain.machines import NamedMachine
from cavvy.domain.values import Struct, replace
from cavvy.store.accounts import check_open
from cavvy.store.announcements import tell
from cavvy.store.arrays import (
    NewJob,
    check_group,
    insert_array,
    insert_group,
    is_array_name,
    remove_empty,
)
from cavvy.store.base import (
    AllocationConflict,
    AtomicWrite,
    NameConflict,
    RowNotFound,
    StaleVersion,
)
from cavvy.store.dependencies import insert_dependencies, look_up
from cavvy.store.documents import (
    check_readable,
    encode,
    storable_attempt,
    storable_event,
    storable_job,
    storable_node,
    storable_observation,
    to_micros,
)
from cavvy.store.drivers import DatabaseSession
from cavvy.store.figures import write_figures
from cavvy.store.ledger import find_posted, post_bill
from cavvy.store.maintenance import CLOSED
from cavvy.store.own_tables import list_tables_of_attempts, list_tables_of_jobs
from cavvy.store.rows import (
    ALLOCATIONS,
    CHARGES,
    CHECKPOINTS,
    EVENTS,
    HOSTS,
    JOB_COLUMNS,
    OBSERVATIONS,
    DocumentCache,
    insert_all_into,
    insert_into,
    job_values,
    update_of,
)

_OR_NOTHING = "ON CONFLICT DO NOTHING"
_INSERT_JOB = insert_into("jobs", JOB_COLUMNS, _OR_NOTHING)
_JOB_KEY = JOB_COLUMNS[:3]  # these columns never change
_UPDATE_JOB = update_of("jobs", JOB_COLUMNS[3:], (*_JOB_KEY, "version"))
DOCUMENT_COLUMNS = ("task", "origin", "snapshot", "job_id")
_NEXT_NUMBER = (
    "INSERT INTO names (project, name, last) VALUES (?, ?, 2)"
    " ON CONFLICT (project, name) DO UPDATE SET last = names.last + 1 RETURNING last"
)
_CHARGED = f"{CHARGES.select} WHERE attempt_id = ? AND rank = ?"
_DELETE_CHARGE = "DELETE FROM charges WHERE attempt_id = ? AND rank = ? AND kind = ? AND since = ?"
# The lock is taken before the row gets its ID, because the row is made from the lock's.
_INSERT_LOCKED_EVENT = (
    "WITH locked AS MATERIALIZED (SELECT pg_advisory_xact_lock(hashtextextended(?, 0))) "
    f"INSERT INTO events ({', '.join(EVENTS.columns)}) "
    f"SELECT {', '.join('?' * len(EVENTS.columns))} FROM locked"
)
_DEVICE_COLUMNS = ("host", "device", "gang", "rank")
_INSERT_ALLOCATION = f"{ALLOCATIONS.insert} {_OR_NOTHING}"
_CPU_SLACK = 1e-6  # sums of tenths of a CPU are not exact in floating point


class WrittenJob(Struct, frozen=True):
    """A job as stored by a write. `documents` states whether the job's task and origin were written
    too."""

    job: JobRecord
    documents: bool


def write_changes(
    session: DatabaseSession, changes: AtomicWrite, documents: DocumentCache
) -> Sequence[WrittenJob]:
    """Write all of `changes` in the open transaction. Raises StaleVersion, NameConflict,
    AllocationConflict, RowNotFound, HashMismatch.
    """
    for gang in changes.release:
        session.run_later("DELETE FROM allocations WHERE gang = ?", (gang,))
    jobs = changes.jobs
    if not session.driver.is_sqlite:
        # sorted, so that all writers lock rows in the same order
        jobs = sorted(jobs, key=lambda job: job.id)
    written = [_write_job(session, job, documents) for job in jobs]
    for attempt in changes.attempts:
        _write_attempt(session, storable_attempt(attempt), attempt.version)
    for node in changes.nodes:
        _write_node(session, storable_node(node), node.version)
    for machine in changes.machines:
        _write_machine(session, machine)
    if changes.charges:
        _write_charges(session, changes.charges, {job.id for job in jobs})
    if changes.events:
        _write_events(session, changes.events)
    for seen in changes.observations:
        session.run_later(OBSERVATIONS.insert, OBSERVATIONS.values(storable_observation(seen)))
    for own in changes.own:
        session.run_later(own.sql, own.values)
    if changes.figures:
        write_figures(session, changes.figures)
    tell(session, changes.steps)
    if changes.allocations:
        _write_allocations(session, changes.allocations)
    return written


def insert_job(session: DatabaseSession, job: JobRecord, event: Event) -> JobRecord:
    """Insert the new job, its documents and its first event. If the job's name is in use, the job
    gets the name NAME-N with the first free number N. The jobs that it waits for are looked up.
    Raises ProjectArchived, DependencyMissing.
    """
    check_open(session, [job.project])
    check_group(session, job)
    stored = storable_job(replace(look_up(session, job), version=0))
    texts = check_readable(job)
    while not _insert_job(session, stored, texts):
        number = session.run(_NEXT_NUMBER, (job.project, job.name)).fetchone()
        assert number is not None
        stored = replace(stored, name=f"{job.name}-{number[0]}")
    insert_dependencies(session, stored)
    _write_events(session, [event])
    return stored


def insert_all(session: DatabaseSession, jobs: Iterable[NewJob]) -> Sequence[str]:
    """Insert jobs and arrays, and return their names. Raises StaleVersion, ProjectArchived,
    DependencyMissing."""
    names = list[str]()
    for new in jobs:
        if new.group:
            insert_group(session, new.job, new.group)
        if new.members:
            names.append(insert_array(session, new.job, new.event, new.members, new.parallel))
        else:
            names.append(insert_job(session, new.job, new.event).name)
    return names


def _insert_job(session: DatabaseSession, stored: JobRecord, texts: tuple[str, str]) -> bool:
    """Insert the job; return False if its name is in use."""
    if is_array_name(session, stored):
        return False
    if session.run(_INSERT_JOB, job_values(stored, 1)).rowcount == 0:
        if session.run("SELECT 1 FROM jobs WHERE id = ?", (stored.id,)).fetchone():
            raise StaleVersion(f"job {stored.id} exists already")
        return False
    values = (*texts, stored.origin.snapshot, stored.id)
    session.run(insert_into("documents", DOCUMENT_COLUMNS), values)
    return True


def remove_job(session: DatabaseSession, job: JobRecord) -> None:
    """Implement `Store.remove_job` in the open transaction."""
    change = "removed = name, name = id, machine = NULL, array_id = NULL, version = version + 1"
    where = "id = ? AND project = ? AND version = ?"
    guarded = (job.id, job.project, job.version)
    if session.run(f"UPDATE jobs SET {change} WHERE {where}", guarded).rowcount == 0:
        raise StaleVersion(f"job {job.id} is no longer at version {job.version}")
    if job.array_id is not None:
        remove_empty(session, job.array_id)
    attempts = "SELECT id FROM attempts WHERE job_id = ?"
    for table in ("nodes", "figures", *list_tables_of_attempts()):
        session.run(f"DELETE FROM {table} WHERE attempt_id IN ({attempts})", (job.id,))
    for table in ("events", "checkpoints", "documents", *list_tables_of_jobs()):
        session.run(f"DELETE FROM {table} WHERE job_id = ?", (job.id,))


def save_checkpoint(
    session: DatabaseSession, checkpoint: SavedCheckpoint, on_behalf: int, keep: int
) -> SavedCheckpoint:
    """Implement `Store.save_checkpoint` in the open transaction."""
    lock = (
        "" if session.driver.is_sqlite else " FOR NO KEY UPDATE"
    )  # writers of one job's checkpoints wait for each other
    owner = (checkpoint.job_id, checkpoint.project)
    job = session.run(
        f"SELECT attempt FROM jobs WHERE id = ? AND project = ?{lock}", owner
    ).fetchone()
    if job is None:
        raise RowNotFound(f"no job {checkpoint.job_id}")
    if job[0] > on_behalf:
        raise StaleVersion(f"attempt {job[0]} of job {checkpoint.job_id} has started")
    newest_first = f"{CHECKPOINTS.select} WHERE job_id = ? ORDER BY number DESC LIMIT 1"
    row = session.run(newest_first, (checkpoint.job_id,)).fetchone()
    newest = CHECKPOINTS.make(row) if row else None
    if newest and (newest.attempt, newest.manifest) == (checkpoint.attempt, checkpoint.manifest):
        return newest
    stored = replace(checkpoint, number=newest.number + 1 if newest else 1)
    session.run(CHECKPOINTS.insert, CHECKPOINTS.values(stored))
    session.run(
        "DELETE FROM checkpoints WHERE job_id = ? AND number <= ?",
        (stored.job_id, stored.number - keep),
    )
    return stored


def _write_job(session: DatabaseSession, job: JobRecord, documents: DocumentCache) -> WrittenJob:
    stored = storable_job(job)
    if job.version == 0:
        check_open(session, [job.project])
        if not _insert_job(session, stored, check_readable(job)):
            raise NameConflict(f"project {job.project} has a job named {job.name} already")
        return WrittenJob(stored, documents=True)
    known = documents.written_at(job)
    values = job_values(stored, stored.version if known is None else known)
    guarded = (*values[3:], *values[:3], job.version)
    stale = StaleVersion(f"job {job.id} is no longer at version {job.version}")
    session.run_later(_UPDATE_JOB, guarded, stale)
    if known is None:
        update = update_of("documents", DOCUMENT_COLUMNS[:-1], DOCUMENT_COLUMNS[-1:])
        session.run_later(update, (*check_readable(job), job.origin.snapshot, job.id))
    return WrittenJob(stored, documents=known is None)


def _write_attempt(session: DatabaseSession, stored: Attempt, version: int) -> None:
    _write_document(
        session,
        "attempts",
        {"id": stored.id, "project": stored.project},
        {"phase": str(stored.phase), "gang": stored.gang, "bought_as": stored.bought_as},
        version,
        stored,
        fixed={"job_id": stored.job_id, "number": stored.number},
    )
    if version == 0:
        values = (stored.offer.key, stored.job_id)
        session.run_later("UPDATE jobs SET place = ? WHERE id = ?", values)


def _write_node(session: DatabaseSession, stored: Node, version: int) -> None:
    key = {"attempt_id": stored.attempt_id, "rank": stored.rank, "project": stored.project}
    _write_document(session, "nodes", key, {}, version, stored)


def _write_machine(session: DatabaseSession, machine: NamedMachine) -> None:
    key: dict[str, object] = {"project": machine.project, "name": machine.name}
    stored = replace(machine, version=machine.version + 1)
    _write_document(session, "machines", key, {}, machine.version, stored)


def _write_document(
    session: DatabaseSession,
    table: str,
    key: dict[str, object],
    columns: dict[str, object],
    version: int,
    stored: Attempt | Node | NamedMachine,
    fixed: Mapping[str, object] = MappingProxyType({}),
) -> None:
    """Insert a row (if `version` is 0) or update it. The statement writes the document and
    `columns`; for an inserted row, it also writes `fixed`. Raises StaleVersion.
    """
    columns = {**columns, "document": encode(stored), "version": stored.version}
    if version:
        sql = update_of(table, tuple(columns), (*key, "version"))
        values = [*columns.values(), *key.values(), version]
    else:
        columns = {**key, **fixed, **columns}
        sql, values = insert_into(table, tuple(columns), _OR_NOTHING), [*columns.values()]
    row = ", ".join(f"{name} {value}" for name, value in key.items())
    stale = StaleVersion(f"the row of {table} ({row}) is not at version {version}")
    session.run_later(sql, values, stale)


def _write_charges(
    session: DatabaseSession, charges: Iterable[Charge], locked: Collection[str]
) -> None:
    """Write charges and their entries of the ledger. The transaction has `locked` these jobs."""
    by_rank: defaultdict[tuple[str, str, int], list[Charge]] = defaultdict(list)
    for charge in charges:
        by_rank[charge.job_id, charge.attempt_id, charge.rank].append(charge)
    last = None
    for (job_id, *rank), rows in sorted(by_rank.items()):  # all writers lock in the same order
        if job_id != last and job_id not in locked and not session.driver.is_sqlite:
            session.run_later("SELECT 1 FROM jobs WHERE id = ? FOR NO KEY UPDATE", (job_id,))
        last = job_id
        found, posted = session.run_all([(_CHARGED, rank), find_posted(rows[0])])
        before = [CHARGES.make(row) for row in found.fetchall()]
        after = {(charge.kind, charge.since): charge for charge in rows}
        for charge in after.values():
            session.run_later(CHARGES.upsert, CHARGES.values(charge))
        for old in before:
            if (old.kind, old.since) not in after:
                values = (*rank, str(old.kind), to_micros(old.since))
                session.run_later(_DELETE_CHARGE, values)
        post_bill(session, before, list(after.values()), posted)
        more = sum(charge.amount.micros for charge in after.values())
        more -= sum(charge.amount.micros for charge in before)
        if more:
            session.run_later("UPDATE jobs SET spent = spent + ? WHERE id = ?", (more, job_id))


def _write_events(session: DatabaseSession, events: Sequence[Event]) -> None:
    tell(session, events)
    if session.driver.is_sqlite:
        for event in events:
            session.run_later(EVENTS.insert, EVENTS.values(storable_event(event)))
        return
    # IDs are assigned when rows are inserted, but readers see them only after the commit. A reader
    # that continues after the newest ID would miss an event with a lower ID that is committed
    # later. So writers of the same job's events wait for each other, all in the same order.
    for event in sorted(events, key=attrgetter("job_id")):
        values = (event.job_id, *EVENTS.values(storable_event(event)))
        session.run_later(_INSERT_LOCKED_EVENT, values)


def _write_allocations(session: DatabaseSession, allocations: Sequence[Allocation]) -> None:
    lock = "" if session.driver.is_sqlite else " FOR UPDATE"
    names = sorted({each.host for each in allocations})  # all writers lock in the same order
    reads = (f"{HOSTS.select} WHERE name = ?{lock}", f"{ALLOCATIONS.select} WHERE host = ?")
    *found, closed_names = session.run_all(
        [*((sql, (name,)) for name in names for sql in reads), (CLOSED, ())]
    )
    hosts, standing = {}, {}
    for name, host, others in zip(names, found[::2], found[1::2], strict=True):
        row = host.fetchone()
        hosts[name] = HOSTS.make(row) if row else None
        standing[name] = [ALLOCATIONS.make(row) for row in others.fetchall()]
    closed = {row[0] for row in closed_names.fetchall()}
    for allocation in allocations:
        if allocation.host in closed:
            raise AllocationConflict(f"host {allocation.host} is cordoned")
        check_allocation(hosts[allocation.host], allocation, standing[allocation.host])
        taken = AllocationConflict(
            f"rank {allocation.rank} of gang {allocation.gang}, or one of its devices, is already "
            "held"
        )
        session.run_later(_INSERT_ALLOCATION, ALLOCATIONS.values(allocation), taken)
        if allocation.part == 1 and (devices := allocation.devices):
            gang, rank = allocation.gang, allocation.rank
            values = [x for each in devices for x in (allocation.host, each, gang, rank)]
            insert = insert_all_into("held_devices", _DEVICE_COLUMNS, len(devices), _OR_NOTHING)
            session.run_later(insert, values, taken, len(devices))
        standing[allocation.host].append(allocation)


def check_allocation(
    host: Host | None, allocation: Allocation, others: Iterable[Allocation]
) -> None:
    """Check that the allocation fits on its host in addition to `others`, the current allocations.
    Allocations on other hosts are ignored.

    Raises RowNotFound if `host` is None. Raises AllocationConflict if a device is in use or
    unknown, or if the host has too few CPUs or too little memory.
    """
    if host is None:
        raise RowNotFound(f"no host {allocation.host}")
    if unknown := set(allocation.devices) - set(host.devices):
        raise AllocationConflict(f"host {host.name} has no device {', '.join(sorted(unknown))}")
    if len(set(allocation.devices)) != len(allocation.devices):
        raise AllocationConflict(f"gang {allocation.gang} names a device of host {host.name} twice")
    cpus, memory_mib = allocation.cpus, allocation.memory_mib
    parts = allocation.part
    for other in others:
        if (other.gang, other.rank) == (allocation.gang, allocation.rank):
            raise AllocationConflict(
                f"rank {allocation.rank} of gang {allocation.gang} already has an allocation"
            )
        if other.host != host.name:
            continue
        cpus += other.cpus
        memory_mib += other.memory_mib
        taken = set(allocation.devices) & set(other.devices)
        parts += other.part if taken else 0
        if taken and parts > 1 + _CPU_SLACK:
            raise AllocationConflict(
                f"gang {other.gang} holds {', '.join(sorted(taken))} of host {host.name}"
            )
    if cpus > host.cpus + _CPU_SLACK:
        raise AllocationConflict(
            f"host {host.name} has {host.cpus:g} CPUs, but {cpus:g} would be used"
        )
    if memory_mib > host.memory_mib:
        raise AllocationConflict(
            f"host {host.name} has {host.memory_mib} MiB of memory, but {memory_mib} would be used"
        )

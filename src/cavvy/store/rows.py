"""Rows to domain objects and back, and the cache of what hardly ever changes: a job's task and
origin.
"""

from datetime import datetime
from threading import Lock

from cavvy.domain.allocations import Allocation, Host
from cavvy.domain.checkpoints import SavedCheckpoint
from cavvy.domain.events import Charge, ChargeKind, Event
from cavvy.domain.jobs import FAR, Job, JobPhase, RunOrigin
from cavvy.domain.markets import MarketTally, Observation, ObservationKind
from cavvy.domain.tasks import Task
from cavvy.domain.units import HourlyRate, Money
from cavvy.store.base import JobSummary
from cavvy.store.documents import (
    decode_devices,
    decode_origin,
    decode_rest,
    decode_task,
    encode,
    plain,
    rest_of,
    to_micros,
    to_time,
)
from cavvy.store.drivers import Row

JOB_COLUMNS = (
    "id, project, name, user_name, phase, reason, priority, submitted_at, since, not_before, "
    "stop_reason, ended_at,"
    " attempt, exit_code, rest, document, version"
)
SUMMARY_COLUMNS = (
    "id, project, name, user_name, phase, reason, priority, submitted_at, since, ended_at, "
    "attempt, exit_code, place,"
    " spent, not_before"
)
SELECT_JOB = (
    f"SELECT {', '.join('j.' + name for name in JOB_COLUMNS.split(', '))}, d.task, d.origin"
    " FROM jobs j JOIN documents d ON d.job_id = j.id"
)

_CACHED = 512  # jobs; a task and its origin are a few KB
_CACHED_CHARACTERS = 65536  # an origin with a bigger diff is not worth its memory


class DocumentCache:
    """Decoded tasks and origins by job, with the job's version at which they were written. Used
    by all threads.
    """

    def __init__(self) -> None:
        self._kept: dict[str, tuple[int, Task, RunOrigin]] = {}
        self._lock = Lock()

    def read(self, job_id: str, written: int, task: str, origin: str) -> tuple[Task, RunOrigin]:
        kept = self._kept.get(job_id)
        if kept is not None and kept[0] == written:
            return kept[1], kept[2]
        decoded = decode_task(task), decode_origin(origin)
        if len(task) + len(origin) <= _CACHED_CHARACTERS:
            self.keep(job_id, written, *decoded)
        return decoded

    def keep(self, job_id: str, written: int, task: Task, origin: RunOrigin) -> None:
        with self._lock:
            self._kept.pop(job_id, None)
            if len(self._kept) >= _CACHED:
                del self._kept[next(iter(self._kept))]
            self._kept[job_id] = (written, task, origin)

    def written_at(self, job: Job) -> int | None:
        """The version at which exactly these objects were written, if that is known."""
        kept = self._kept.get(job.id)
        return (
            kept[0] if kept is not None and kept[1] is job.task and kept[2] is job.origin else None
        )


def to_micros_or_none(time: datetime | None) -> int | None:
    return None if time is None else to_micros(time)


def to_time_or_none(micros: int | None) -> datetime | None:
    return None if micros is None else to_time(micros)


def job_values(job: Job, document: int) -> tuple[object, ...]:
    """The values of JOB_COLUMNS."""
    return (
        job.id,
        job.project,
        job.name,
        job.user,
        str(job.phase),
        job.reason,
        job.task.priority,
        to_micros(job.submitted_at),
        to_micros(job.since),
        to_micros_or_none(job.not_before),
        job.stop_reason,
        to_micros_or_none(job.ended_at),
        job.attempt,
        job.exit_code,
        encode(rest_of(job)),
        document,
        job.version,
    )


def make_job(row: Row, documents: DocumentCache) -> Job:
    """From a row of SELECT_JOB."""
    rest = decode_rest(row[14])
    task, origin = documents.read(row[0], row[15], row[17], row[18])
    return Job(
        id=row[0],
        project=row[1],
        name=row[2],
        user=row[3],
        task=task,
        origin=origin,
        phase=JobPhase(row[4]),
        reason=row[5],
        submitted_at=to_time(row[7]),
        since=to_time(row[8]),
        not_before=to_time_or_none(row[9]),
        attempt=row[12],
        stop_reason=row[10],
        stop_cause=rest.stop_cause,
        exit_code=row[13],
        ended_at=to_time_or_none(row[11]),
        consented=rest.consented,
        ceiling=rest.ceiling,
        retries=rest.retries,
        avoid=rest.avoid,
        standbys=rest.standbys,
        numbered=rest.numbered,
        plan_state=rest.plan_state,
        held_until=rest.held_until,
        last_run=rest.last_run,
        version=row[16],
    )


def make_summary(row: Row) -> JobSummary:
    """From a row of SUMMARY_COLUMNS."""
    return JobSummary(
        id=row[0],
        project=row[1],
        name=row[2],
        user=row[3],
        phase=JobPhase(row[4]),
        reason=row[5],
        priority=row[6],
        submitted_at=to_time(row[7]),
        since=to_time(row[8]),
        ended_at=to_time_or_none(row[9]),
        attempt=row[10],
        exit_code=row[11],
        place=row[12],
        spent=Money(row[13]),
        held=to_time_or_none(row[14]) == FAR,
    )


EVENT_COLUMNS = "id, project, job_id, attempt, rank, at, kind, fact, text"


def make_event(row: Row) -> Event:
    return Event(
        id=row[0],
        project=row[1],
        job_id=row[2],
        attempt=row[3],
        rank=row[4],
        at=to_time(row[5]),
        kind=row[6],
        fact=row[7],
        text=row[8],
    )


CHARGE_COLUMNS = "project, job_id, attempt_id, rank, kind, since, until, rate, amount"


def charge_values(charge: Charge) -> tuple[object, ...]:
    return (
        charge.project,
        charge.job_id,
        charge.attempt_id,
        charge.rank,
        str(charge.kind),
        to_micros(charge.since),
        to_micros(charge.until),
        charge.rate.micros_per_hour,
        charge.amount.micros,
    )


def make_charge(row: Row) -> Charge:
    return Charge(
        project=row[0],
        job_id=row[1],
        attempt_id=row[2],
        rank=row[3],
        kind=ChargeKind(row[4]),
        since=to_time(row[5]),
        until=to_time(row[6]),
        rate=HourlyRate(row[7]),
        amount=Money(row[8]),
    )


CHECKPOINT_COLUMNS = "job_id, number, project, attempt, manifest, files, bytes, made_at, saved_at"


def checkpoint_values(saved: SavedCheckpoint) -> tuple[object, ...]:
    return (
        saved.job_id,
        saved.number,
        saved.project,
        saved.attempt,
        saved.manifest,
        saved.files,
        saved.bytes,
        to_micros(saved.made_at),
        to_micros(saved.saved_at),
    )


def make_checkpoint(row: Row) -> SavedCheckpoint:
    return SavedCheckpoint(
        job_id=row[0],
        number=row[1],
        project=row[2],
        attempt=row[3],
        manifest=row[4],
        files=row[5],
        bytes=row[6],
        made_at=to_time(row[7]),
        saved_at=to_time(row[8]),
    )


OBSERVATION_COLUMNS = "market, kind, at, seconds, nodes, rate, text"
SELECT_TALLIES = (
    "SELECT market, kind, COUNT(*), SUM(seconds), SUM(seconds * nodes), MIN(at), MAX(at) FROM "
    "observations"
    " WHERE at >= ? AND kind <> 'price' GROUP BY market, kind ORDER BY market, kind"
)


def observation_values(seen: Observation) -> tuple[object, ...]:
    return (
        seen.market,
        str(seen.kind),
        to_micros(seen.at),
        seen.seconds,
        seen.nodes,
        None if seen.rate is None else seen.rate.micros_per_hour,
        plain(seen.text),
    )


def make_observation(row: Row) -> Observation:
    return Observation(
        market=row[0],
        kind=ObservationKind(row[1]),
        at=to_time(row[2]),
        seconds=row[3],
        nodes=row[4],
        rate=None if row[5] is None else HourlyRate(row[5]),
        text=row[6],
    )


def make_tally(row: Row) -> MarketTally:
    return MarketTally(
        market=row[0],
        kind=ObservationKind(row[1]),
        count=row[2],
        seconds=row[3],
        node_seconds=row[4],
        first_at=to_time(row[5]),
        last_at=to_time(row[6]),
    )


HOST_COLUMNS = "name, cpus, memory_mib, devices"


def make_host(row: Row) -> Host:
    return Host(name=row[0], cpus=row[1], memory_mib=row[2], devices=decode_devices(row[3]))


ALLOCATION_COLUMNS = "host, gang, rank, project, cpus, memory_mib, devices"


def make_allocation(row: Row) -> Allocation:
    return Allocation(
        host=row[0],
        gang=row[1],
        rank=row[2],
        project=row[3],
        cpus=row[4],
        memory_mib=row[5],
        devices=decode_devices(row[6]),
    )

"""A store in memory, for the simulator and tests: as atomic as the SQL store, but not durable."""

import secrets
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import islice
from typing import TypeVar

from cavvy.domain.allocations import Allocation, Host
from cavvy.domain.checkpoints import SavedCheckpoint
from cavvy.domain.events import Charge, Event
from cavvy.domain.jobs import JOB_ENDS, Attempt, AttemptPhase, Job, JobPhase, Node
from cavvy.domain.markets import MarketTally, Observation, ObservationKind
from cavvy.domain.provider_state import ProviderDocument
from cavvy.domain.units import Money
from cavvy.store.allocations import check_allocation
from cavvy.store.base import (
    AtomicWrite,
    JobSummary,
    NameConflict,
    RowNotFound,
    SealedSecret,
    StaleVersion,
    SummaryPage,
    make_page,
    summarize,
)
from cavvy.store.documents import (
    check_readable,
    storable_attempt,
    storable_event,
    storable_job,
    storable_node,
    storable_observation,
)

_T = TypeVar("_T")
_ChargeKey = tuple[str, int, str, datetime]  # attempt, rank, kind, since


def _new_id() -> str:
    return secrets.token_hex(16)


@dataclass(slots=True)
class _Staged:
    """The rows of one `commit`: its later checks see them, and a failing check discards them."""

    jobs: dict[str, Job] = field(default_factory=dict)
    names: dict[tuple[str, str], str] = field(default_factory=dict)
    attempts: dict[str, Attempt] = field(default_factory=dict)
    gangs: dict[str, str] = field(default_factory=dict)
    freed: set[str] = field(default_factory=set)  # names of gangs that were handed on
    nodes: dict[tuple[str, int], Node] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    charges: dict[_ChargeKey, Charge] = field(default_factory=dict)
    allocations: list[Allocation] = field(default_factory=list)
    observations: list[Observation] = field(default_factory=list)


@dataclass(slots=True)
class _JobRecord:
    """What is stored about one job beside its row."""

    attempts: dict[int, str] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    charges: dict[_ChargeKey, Charge] = field(default_factory=dict)
    checkpoints: list[SavedCheckpoint] = field(default_factory=list)  # newest first
    spent: int = 0
    place: str | None = None


class MemoryStore:
    """Rows in dictionaries. Nothing awaits inside a method, so each is atomic on its event loop."""

    def __init__(self, make_id: Callable[[], str] = _new_id) -> None:
        self._make_id = make_id
        self._installation: str | None = None
        self._jobs: dict[str, Job] = {}
        self._records: dict[str, _JobRecord] = {}
        self._names: dict[tuple[str, str], str] = {}
        self._last_number: dict[tuple[str, str], int] = {}
        self._ids: list[str] = []  # sorted
        self._project_ids: dict[str, list[str]] = defaultdict(list)  # sorted
        self._queued: dict[str, None] = {}
        self._live: dict[str, None] = {}
        self._attempts: dict[str, Attempt] = {}
        self._open_attempts: dict[str, None] = {}
        self._gangs: dict[str, str] = {}
        self._nodes: dict[str, dict[int, Node]] = defaultdict(dict)
        self._last_event = 0
        self._observations: list[Observation] = []
        self._hosts: dict[str, Host] = {}
        self._allocations: list[Allocation] = []
        self._secrets: dict[tuple[str, str], SealedSecret] = {}
        self._documents: dict[tuple[str, str, str], ProviderDocument] = {}

    async def open(self) -> None:
        """Nothing to create."""

    async def close(self) -> None:
        """Nothing to close."""

    async def installation(self) -> str:
        if self._installation is None:
            self._installation = self._make_id()
        return self._installation

    # Writes

    async def commit(self, changes: AtomicWrite) -> None:
        staged = _Staged()
        for job in changes.jobs:
            self._stage_job(staged, job)
        for attempt in changes.attempts:
            self._stage_attempt(staged, attempt)
        for node in changes.nodes:
            self._stage_node(staged, node)
        for event in changes.events:
            self._need_job(staged, event.job_id)
            staged.events.append(event)
        for charge in changes.charges:
            _found(self._attempt(staged, charge.attempt_id), f"no attempt {charge.attempt_id}")
            staged.charges[charge.attempt_id, charge.rank, charge.kind, charge.since] = charge
        staged.observations += map(storable_observation, changes.observations)
        if changes.release or changes.allocations:
            staged.allocations = [
                allocation
                for allocation in self._allocations
                if allocation.gang not in changes.release
            ]
            for allocation in changes.allocations:
                check_allocation(self._hosts.get(allocation.host), allocation, staged.allocations)
                staged.allocations.append(allocation)
            self._allocations = staged.allocations
        self._apply(staged)

    async def submit(self, job: Job, event: Event) -> Job:
        check_readable(job)
        if job.id in self._jobs:
            raise StaleVersion(f"job {job.id} exists already")
        name, number = job.name, self._last_number.get((job.project, job.name), 1)
        while (job.project, name) in self._names:
            number += 1
            name = f"{job.name}-{number}"
        if number > 1:
            self._last_number[job.project, job.name] = number
        stored = storable_job(replace(job, name=name, version=0))
        self._apply(
            _Staged(jobs={job.id: stored}, names={(job.project, name): job.id}, events=[event])
        )
        return stored

    def _stage_job(self, staged: _Staged, job: Job) -> None:
        stored = staged.jobs.get(job.id) or self._jobs.get(job.id)
        if (stored.version if stored else 0) != job.version:
            raise StaleVersion(
                f"job {job.id} is at version {stored.version if stored else 0}, not {job.version}"
            )
        if stored is None:
            key = (job.project, job.name)
            if key in self._names or key in staged.names:
                raise NameConflict(f"project {job.project} has a job named {job.name} already")
            staged.names[key] = job.id
        elif (stored.project, stored.name) != (job.project, job.name):
            raise StaleVersion(f"job {job.id} cannot change its project or name")
        if stored is None or stored.task is not job.task or stored.origin is not job.origin:
            check_readable(job)
        staged.jobs[job.id] = storable_job(job)

    def _stage_attempt(self, staged: _Staged, attempt: Attempt) -> None:
        stored = self._attempt(staged, attempt.id)
        if (stored.version if stored else 0) != attempt.version or (
            stored and stored.project != attempt.project
        ):
            raise StaleVersion(f"attempt {attempt.id} is not at version {attempt.version}")
        if stored is None:
            if self._is_twin(staged, attempt):
                raise StaleVersion(
                    f"attempt {attempt.number} of job {attempt.job_id} exists already"
                )
            self._need_job(staged, attempt.job_id)
            staged.gangs[attempt.gang] = attempt.id
        elif attempt.gang != stored.gang:
            staged.freed.add(stored.gang)
            staged.gangs[attempt.gang] = attempt.id
        staged.attempts[attempt.id] = storable_attempt(attempt)

    def _is_twin(self, staged: _Staged, attempt: Attempt) -> bool:
        return (
            (attempt.gang in self._gangs and attempt.gang not in staged.freed)
            or attempt.gang in staged.gangs
            or attempt.number in self._record(attempt.job_id).attempts
            or any(
                (a.job_id, a.number) == (attempt.job_id, attempt.number)
                for a in staged.attempts.values()
            )
        )

    def _stage_node(self, staged: _Staged, node: Node) -> None:
        key = (node.attempt_id, node.rank)
        stored = staged.nodes.get(key) or self._nodes.get(node.attempt_id, {}).get(node.rank)
        if (stored.version if stored else 0) != node.version or (
            stored and stored.project != node.project
        ):
            raise StaleVersion(
                f"rank {node.rank} of attempt {node.attempt_id} is not at version {node.version}"
            )
        _found(self._attempt(staged, node.attempt_id), f"no attempt {node.attempt_id}")
        staged.nodes[key] = storable_node(node)

    def _need_job(self, staged: _Staged, job_id: str) -> None:
        if job_id not in staged.jobs and job_id not in self._jobs:
            raise RowNotFound(f"no job {job_id}")

    def _attempt(self, staged: _Staged, attempt_id: str) -> Attempt | None:
        return staged.attempts.get(attempt_id) or self._attempts.get(attempt_id)

    def _record(self, job_id: str) -> _JobRecord:
        return self._records.get(job_id) or _JobRecord()

    def _apply(self, staged: _Staged) -> None:
        for job in staged.jobs.values():
            self._put_job(job)
        self._names.update(staged.names)
        for attempt in staged.attempts.values():
            self._put_attempt(attempt)
        for gang in staged.freed:
            self._gangs.pop(gang, None)
        self._gangs.update(staged.gangs)
        for node in staged.nodes.values():
            self._nodes[node.attempt_id][node.rank] = node
        for event in staged.events:
            self._last_event += 1
            self._records[event.job_id].events.append(storable_event(event, self._last_event))
        self._observations += staged.observations
        for key, charge in staged.charges.items():
            record = self._records[charge.job_id]
            old = record.charges.get(key)
            record.spent += charge.amount.micros - (old.amount.micros if old else 0)
            record.charges[key] = charge

    def _put_job(self, job: Job) -> None:
        if job.id not in self._jobs:
            insort(self._ids, job.id)
            insort(self._project_ids[job.project], job.id)
            self._records[job.id] = _JobRecord()
        self._jobs[job.id] = job
        _mark(self._queued, job.id, job.phase is JobPhase.QUEUED)
        _mark(self._live, job.id, job.phase not in JOB_ENDS)

    def _put_attempt(self, attempt: Attempt) -> None:
        if attempt.id not in self._attempts:
            record = self._records[attempt.job_id]
            record.attempts[attempt.number] = attempt.id
            record.place = attempt.offer.key
        self._attempts[attempt.id] = attempt
        _mark(self._open_attempts, attempt.id, attempt.phase is not AttemptPhase.ENDED)

    # Reads

    async def job(self, job_id: str) -> Job:
        return _found(self._jobs.get(job_id), f"no job {job_id}")

    async def find_job(self, project: str, name_or_id: str) -> Job:
        job = self._jobs.get(self._names.get((project, name_or_id), name_or_id))
        owned = job if job and job.project == project else None
        return _found(owned, f"project {project} has no job named {name_or_id}")

    async def list_jobs(
        self,
        project: str | None,
        phases: Collection[JobPhase] = (),
        cursor: str | None = None,
        limit: int = 50,
    ) -> SummaryPage:
        ids = self._ids if project is None else self._project_ids.get(project, [])
        end = len(ids) if cursor is None else bisect_left(ids, cursor)
        newest = (self._jobs[ids[i]] for i in range(end - 1, -1, -1))
        found = list(
            islice((job for job in newest if not phases or job.phase in phases), limit + 1)
        )
        return make_page([self._summary(job) for job in found], limit)

    def _summary(self, job: Job) -> JobSummary:
        record = self._records[job.id]
        return summarize(job, record.place, Money(record.spent))

    async def count_jobs(self, project: str | None) -> dict[JobPhase, int]:
        counts: dict[JobPhase, int] = {}
        for job_id in self._ids if project is None else self._project_ids.get(project, []):
            phase = self._jobs[job_id].phase
            counts[phase] = counts.get(phase, 0) + 1
        return counts

    def _queue(self) -> Iterable[Job]:
        return (job for job in map(self._jobs.__getitem__, self._queued) if job.stop_reason is None)

    async def waiting(self, now: datetime, limit: int) -> Sequence[Job]:
        ready = [job for job in self._queue() if job.not_before is None or job.not_before <= now]
        return sorted(ready, key=_queue_order)[:limit]

    async def next_waiting(self, now: datetime) -> datetime | None:
        return min(
            (job.not_before for job in self._queue() if job.not_before and job.not_before > now),
            default=None,
        )

    async def queue_position(self, job: Job, now: datetime | None = None) -> int:
        if job.phase is not JobPhase.QUEUED:
            return 0
        order = _queue_order(job)
        return 1 + sum(
            _queue_order(other) < order
            for other in self._queue()
            if now is None or other.not_before is None or other.not_before <= now
        )

    async def snapshots(self) -> Collection[str]:
        return {job.origin.snapshot for job in self._jobs.values() if job.origin.snapshot}

    async def unfinished(self) -> Sequence[str]:
        return sorted(
            {*self._live, *(self._attempts[attempt].job_id for attempt in self._open_attempts)}
        )

    async def attempts(self, job_id: str) -> Sequence[Attempt]:
        return [self._attempts[i] for _, i in sorted(self._record(job_id).attempts.items())]

    async def attempt_of_gang(self, gang: str) -> Attempt:
        attempt = self._attempts.get(self._gangs.get(gang, ""))
        return _found(attempt, f"no attempt has the gang {gang}")

    async def open_attempts(self, project: str | None = None) -> Sequence[Attempt]:
        found = (self._attempts[i] for i in sorted(self._open_attempts))
        return [attempt for attempt in found if project is None or attempt.project == project]

    async def nodes(self, attempt_id: str) -> Sequence[Node]:
        return [node for _, node in sorted(self._nodes.get(attempt_id, {}).items())]

    async def node(self, attempt_id: str, rank: int) -> Node:
        node = self._nodes.get(attempt_id, {}).get(rank)
        return _found(node, f"attempt {attempt_id} has no rank {rank}")

    async def events(self, job_id: str, after: int = 0, limit: int = 1000) -> Sequence[Event]:
        return [event for event in self._record(job_id).events if event.id > after][:limit]

    async def charges(self, job_id: str) -> Sequence[Charge]:
        return sorted(
            self._record(job_id).charges.values(),
            key=lambda c: (c.attempt_id, c.rank, c.since, c.kind),
        )

    async def spent(self, project: str, since: datetime | None = None) -> Money:
        return Money(
            sum(
                charge.amount.micros
                for job_id in self._project_ids.get(project, ())
                for charge in self._record(job_id).charges.values()
                if since is None or charge.since >= since
            )
        )

    # Checkpoints

    async def save_checkpoint(
        self, checkpoint: SavedCheckpoint, *, on_behalf: int, keep: int = 2
    ) -> SavedCheckpoint:
        job = self._jobs.get(checkpoint.job_id)
        owned = job if job and job.project == checkpoint.project else None
        job = _found(owned, f"no job {checkpoint.job_id}")
        if job.attempt > on_behalf:
            raise StaleVersion(f"attempt {job.attempt} of job {job.id} has begun")
        record = self._records[job.id]
        kept = record.checkpoints
        newest = kept[0] if kept else None
        if newest and (newest.attempt, newest.manifest) == (
            checkpoint.attempt,
            checkpoint.manifest,
        ):
            return newest
        stored = replace(checkpoint, number=newest.number + 1 if newest else 1)
        record.checkpoints = [stored, *kept][:keep]
        return stored

    async def checkpoints(self, job_id: str) -> Sequence[SavedCheckpoint]:
        return list(self._record(job_id).checkpoints)

    # Markets

    async def observations(
        self, markets: Collection[str], since: datetime, limit: int = 2000
    ) -> Sequence[Observation]:
        found = [seen for seen in self._observations if seen.market in markets and seen.at >= since]
        return sorted(found, key=lambda seen: seen.at)[-limit:]

    async def tallies(self, since: datetime) -> Sequence[MarketTally]:
        groups: dict[tuple[str, ObservationKind], list[Observation]] = defaultdict(list)
        for seen in self._observations:
            if seen.at >= since and seen.kind is not ObservationKind.PRICE:
                groups[seen.market, seen.kind].append(seen)
        return [
            MarketTally(
                market=market,
                kind=kind,
                count=len(group),
                seconds=sum(seen.seconds for seen in group),
                node_seconds=sum(seen.seconds * seen.nodes for seen in group),
                first_at=min(seen.at for seen in group),
                last_at=max(seen.at for seen in group),
            )
            for (market, kind), group in sorted(groups.items())
        ]

    async def forget_observations(self, before: datetime) -> None:
        self._observations = [seen for seen in self._observations if seen.at >= before]

    # Hosts, allocations and secrets

    async def put_host(self, host: Host) -> None:
        self._hosts[host.name] = host

    async def hosts(self) -> Sequence[Host]:
        return [host for _, host in sorted(self._hosts.items())]

    async def allocations(self, host: str | None = None) -> Sequence[Allocation]:
        found = (
            allocation
            for allocation in self._allocations
            if host is None or allocation.host == host
        )
        return sorted(
            found, key=lambda allocation: (allocation.host, allocation.gang, allocation.rank)
        )

    async def put_secret(self, secret: SealedSecret) -> None:
        self._secrets[secret.project, secret.name] = secret

    async def secrets(self, project: str) -> Sequence[SealedSecret]:
        return [secret for key, secret in sorted(self._secrets.items()) if key[0] == project]

    async def delete_secret(self, project: str, name: str) -> None:
        found = self._secrets.pop((project, name), None)
        _found(found, f"project {project} has no secret named {name}")

    async def provider_documents(
        self, provider: str, collection: str, name: str | None = None
    ) -> Sequence[ProviderDocument]:
        return [
            document
            for key, document in sorted(self._documents.items())
            if key[:2] == (provider, collection) and name in (None, document.name)
        ]

    async def swap_provider_document(
        self, provider: str, document: ProviderDocument, *, delete: bool = False
    ) -> bool:
        key = (provider, document.collection, document.name)
        stored = self._documents.get(key)
        if (stored.version if stored else 0) != document.version - 1:
            return False
        if delete:
            self._documents.pop(key, None)
        else:
            self._documents[key] = document
        return True


def _found(row: _T | None, missing: str) -> _T:
    if row is None:
        raise RowNotFound(missing)
    return row


def _mark(marked: dict[str, None], key: str, wanted: bool) -> None:
    if wanted:
        marked[key] = None
    else:
        marked.pop(key, None)


def _queue_order(job: Job) -> tuple[int, str]:
    return (-job.task.priority, job.id)

"""The interface of a store, and its errors. Queries live only in this module; only `commit`
writes.

Errors:

* StoreError
  + StaleVersion        another writer stored a newer version first; read again
  + RowNotFound         no such row (in this project)
  + NameConflict        the name is taken
  + HashMismatch        bytes do not match their hash, or a document cannot be read back; do not
                        send it again
  + AllocationConflict  another gang holds the devices, CPUs or memory
  + StoreFull           the disk or database is full; nothing was written
  + StoreUnusable       the database is newer than this program, damaged or unreachable; a person
                        must act
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from cavvy.domain.allocations import Allocation, Host
from cavvy.domain.checkpoints import SavedCheckpoint
from cavvy.domain.events import Charge, Event
from cavvy.domain.jobs import FAR, Attempt, Job, JobPhase, Node
from cavvy.domain.markets import MarketTally, Observation
from cavvy.domain.provider_state import ProviderDocument
from cavvy.domain.units import Money


class StoreError(Exception):
    """Base of all errors a store raises."""


class StaleVersion(StoreError):
    """Another writer stored a newer version first; read again."""


class RowNotFound(StoreError):
    """No such row in this project."""


class NameConflict(StoreError):
    """The name is taken."""


class HashMismatch(StoreError):
    """Bytes do not match their hash, or a document cannot be read back; do not send it again."""


class AllocationConflict(StoreError):
    """Another gang holds the devices, CPUs or memory."""


class StoreFull(StoreError):
    """The disk or database is full; nothing was written."""


class StoreUnusable(StoreError):
    """A person must act; the message says how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AtomicWrite:
    """One atomic write. Each row carries the version at which it was read; version 0 inserts it.

    The store writes version + 1. It raises StaleVersion and writes nothing if a version differs, if
    an inserted row exists, or if an update changes a row's project or a job's name. If an attempt
    renames its gang, a later attempt in the same write may use the old name. Raises RowNotFound if
    the parent (job, attempt, host) of a row does not exist. The order is `release`, jobs, attempts,
    nodes, charges, events, observations, allocations. Allocations are checked in the same
    transaction against their host and its other allocations. `release` names gangs whose
    allocations are removed. `charges` are the whole bill so far of each node in them, and replace
    the node's earlier charges.
    """

    jobs: Sequence[Job] = ()
    attempts: Sequence[Attempt] = ()
    nodes: Sequence[Node] = ()
    events: Sequence[Event] = ()
    charges: Sequence[Charge] = ()
    allocations: Sequence[Allocation] = ()
    release: Sequence[str] = ()
    observations: Sequence[Observation] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSummary:
    """A job without its task, for listings; read without decoding documents."""

    id: str
    project: str
    name: str
    user: str
    phase: JobPhase
    reason: str
    priority: int
    submitted_at: datetime
    since: datetime
    ended_at: datetime | None
    attempt: int
    exit_code: int | None
    place: str | None  # offer key of the latest attempt
    spent: Money
    held: bool  # not in the queue: waits for a schedule, or for a window


def summarize(job: Job, place: str | None, spent: Money) -> JobSummary:
    """The summary of a job that was read with its task."""
    return JobSummary(
        id=job.id,
        project=job.project,
        name=job.name,
        user=job.user,
        phase=job.phase,
        reason=job.reason,
        priority=job.task.priority,
        submitted_at=job.submitted_at,
        since=job.since,
        ended_at=job.ended_at,
        attempt=job.attempt,
        exit_code=job.exit_code,
        place=place,
        spent=spent,
        held=job.not_before == FAR,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SummaryPage:
    """A page of summaries, newest first; `cursor` starts the next page, None marks the last."""

    jobs: Sequence[JobSummary]
    cursor: str | None


def make_page(found: Sequence[JobSummary], limit: int) -> SummaryPage:
    """The page of `found`, which was requested with one summary more than `limit`."""
    more = 0 < limit < len(found)
    return SummaryPage(jobs=found[:limit], cursor=found[limit - 1].id if more else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedSecret:
    """A secret's name and its encrypted value; plain text never reaches the store."""

    project: str
    name: str
    sealed: bytes
    updated_at: datetime


class Store(Protocol):
    """A store of jobs and what belongs to them. Reads of a tenant's rows name the project; None is
    for the control plane itself.
    """

    async def open(self) -> None:
        """Create or migrate the schema. Raises StoreUnusable."""

    async def close(self) -> None: ...
    async def installation(self) -> str:
        """This installation's random id, which never changes."""

    async def commit(self, changes: AtomicWrite) -> None:
        """Write all or nothing. Raises StaleVersion, NameConflict, AllocationConflict,
        StoreFull.
        """

    async def submit(self, job: Job, event: Event) -> Job:
        """Insert a new job under `job.name`, or the first free of name-2, name-3, ...; return it
        as stored.
        """

    async def job(self, job_id: str) -> Job: ...
    async def find_job(self, project: str, name_or_id: str) -> Job:
        """By exact name or id in this project. Raises RowNotFound."""

    async def list_jobs(
        self,
        project: str | None,
        phases: Collection[JobPhase] = (),
        cursor: str | None = None,
        limit: int = 50,
    ) -> SummaryPage: ...
    async def count_jobs(self, project: str | None) -> dict[JobPhase, int]: ...
    async def waiting(self, now: datetime, limit: int) -> Sequence[Job]:
        """Queued jobs that may start (`not_before` passed, no stop requested), by priority
        descending, then id.
        """

    async def next_waiting(self, now: datetime) -> datetime | None:
        """The earliest `not_before` still ahead among queued jobs."""

    async def queue_position(self, job: Job, now: datetime | None = None) -> int:
        """1 for the next job to start, 0 for a job that is not queued. Queued jobs of all projects
        count; with `now`, those that must not start yet do not.
        """

    async def snapshots(self) -> Collection[str]:
        """Content hashes of the working folders of all jobs, which garbage collection of blobs must
        keep."""

    async def unfinished(self) -> Sequence[str]:
        """Ids of jobs that are not ended or have an attempt that is not ended."""

    async def attempts(self, job_id: str) -> Sequence[Attempt]: ...
    async def attempt_of_gang(self, gang: str) -> Attempt:
        """Raises RowNotFound."""

    async def open_attempts(self, project: str | None = None) -> Sequence[Attempt]:
        """All attempts that have not ended, and so may cost money now."""

    async def nodes(self, attempt_id: str) -> Sequence[Node]:
        """By rank."""

    async def node(self, attempt_id: str, rank: int) -> Node: ...
    async def events(self, job_id: str, after: int = 0, limit: int = 1000) -> Sequence[Event]:
        """Events with an id above `after`, oldest first."""

    async def charges(self, job_id: str) -> Sequence[Charge]:
        """Charges by attempt, rank and time."""

    async def spent(self, project: str, since: datetime | None = None) -> Money:
        """The sum of the project's charges; with `since`, only those that began then or later."""

    async def save_checkpoint(
        self, checkpoint: SavedCheckpoint, *, on_behalf: int, keep: int = 2
    ) -> SavedCheckpoint:
        """Store a checkpoint as the job's newest, keep only the newest `keep`, and return it with
        its number.

        Storing the newest again (same attempt and manifest) changes nothing. Raises RowNotFound if
        the project has no such job, StaleVersion if an attempt after number `on_behalf` has begun.
        """

    async def checkpoints(self, job_id: str) -> Sequence[SavedCheckpoint]:
        """Newest first."""

    async def observations(
        self, markets: Collection[str], since: datetime, limit: int = 2000
    ) -> Sequence[Observation]:
        """Observations of these markets since then, oldest first; only the newest `limit`."""

    async def tallies(self, since: datetime) -> Sequence[MarketTally]:
        """Observations since then, except prices, summed by market and kind and in that order."""

    async def forget_observations(self, before: datetime) -> None: ...
    async def put_host(self, host: Host) -> None:
        """Insert or replace the host. Its allocations stay, even if it has become smaller."""

    async def hosts(self) -> Sequence[Host]: ...
    async def allocations(self, host: str | None = None) -> Sequence[Allocation]: ...
    async def put_secret(self, secret: SealedSecret) -> None: ...
    async def secrets(self, project: str) -> Sequence[SealedSecret]: ...
    async def delete_secret(self, project: str, name: str) -> None:
        """Raises RowNotFound."""

    async def provider_documents(
        self, provider: str, collection: str, name: str | None = None
    ) -> Sequence[ProviderDocument]:
        """By name."""

    async def swap_provider_document(
        self, provider: str, document: ProviderDocument, *, delete: bool = False
    ) -> bool:
        """Write or delete a document stored at `document.version` - 1 (0: not stored); returns
        False and changes nothing if it has another version.
        """

"""What other modules ask of a store. Queries live only in this module; only `commit` writes.

Errors:

* StoreError + StaleVersion        somebody wrote a newer version first; read again + RowNotFound
  no such row (in this project) + NameConflict     the name is taken + HashMismatch     bytes are
  not what their hash says, or a document could not be read back; do not send it again +
  AllocationConflict         the devices, CPUs or memory are held by another gang + StoreFull
  the disk or database has no module; nothing was written + StoreUnusable     the database is newer
  than this program, damaged or unreachable; a person must act
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
from cavvy.domain.units import Money


class StoreError(Exception):
    """Base of all errors a store raises."""


class StaleVersion(StoreError):
    """Somebody wrote a newer version first; read again."""


class RowNotFound(StoreError):
    """No such row in this project."""


class NameConflict(StoreError):
    """The name is taken."""


class HashMismatch(StoreError):
    """The bytes are not what their hash says, or a document could not be read back; do not send
    it again.
    """


class AllocationConflict(StoreError):
    """Another gang holds what was asked for."""


class StoreFull(StoreError):
    """No room left; nothing was written."""


class StoreUnusable(StoreError):
    """A person must act; the message says how."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AtomicWrite:
    """One atomic write. Rows carry the version they were read at; version 0 means insert.

    Each stored row gets version + 1. A guard that fails raises StaleVersion and nothing is written;
    so does an insert of what exists, and an update that moves a row to another project or renames a
    job. An attempt that takes another name for its gang leaves the old one to an attempt that
    follows in the same write. A row whose parent (job, attempt, host) does not exist raises
    RowNotFound. They are applied in the order of `release`, jobs, attempts, nodes, events, charges,
    observations, holds. Holds are checked against their host's row and the other holds in the same
    transaction. `release` names gangs whose holds end.
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
    held: bool  # not in the queue: a schedule, or a window that has not begun


def summarize(job: Job, place: str | None, spent: Money) -> JobSummary:
    """The summary of a job that is known whole."""
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
    """Some summaries, newest first, and the cursor of the next page (None: no more)."""

    jobs: Sequence[JobSummary]
    cursor: str | None


def make_page(found: Sequence[JobSummary], limit: int) -> SummaryPage:
    """The page of `found`, which was asked for one summary more than `limit`."""
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
    """Everything async; every read of a tenant's rows names the project, or None for the control
    plane itself.
    """

    async def open(self) -> None:
        """Create or migrate the schema. Raises StoreUnusable."""

    async def close(self) -> None: ...
    async def installation(self) -> str:
        """This installation's random id, made on first use and never changed."""

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
        """Queued jobs that may start (`not_before` passed, no stop wanted), by priority
        descending, then id.
        """

    async def next_waiting(self, now: datetime) -> datetime | None:
        """The earliest `not_before` still ahead among queued jobs."""

    async def queue_position(self, job: Job, now: datetime | None = None) -> int:
        """1 for the job that is next, 0 for one that is not queued; counts queued jobs of all
        projects that go first.

        With `now`, those that must not start yet are not counted.
        """

    async def snapshots(self) -> Collection[str]:
        """Content hashes of the working folders of all jobs: what a sweep of blobs must keep."""

    async def unfinished(self) -> Sequence[str]:
        """Ids of jobs that are not ended or have an attempt that is not ended."""

    async def attempts(self, job_id: str) -> Sequence[Attempt]: ...
    async def attempt_of_gang(self, gang: str) -> Attempt:
        """Raises RowNotFound."""

    async def open_attempts(self, project: str | None = None) -> Sequence[Attempt]:
        """Every attempt that is not ended: what may cost money now."""

    async def nodes(self, attempt_id: str) -> Sequence[Node]:
        """By rank."""

    async def node(self, attempt_id: str, rank: int) -> Node: ...
    async def events(self, job_id: str, after: int = 0, limit: int = 1000) -> Sequence[Event]:
        """Oldest first, those with an id above `after`."""

    async def charges(self, job_id: str) -> Sequence[Charge]:
        """By attempt, rank and time."""

    async def spent(self, project: str, since: datetime | None = None) -> Money:
        """What the project's charges sum to; with `since`, of those that began then or later."""

    async def save_checkpoint(
        self, checkpoint: SavedCheckpoint, *, on_behalf: int, keep: int = 2
    ) -> SavedCheckpoint:
        """Make a checkpoint the job's newest and return it with its number; all but the newest
        `keep` are forgotten.

        The same one again (attempt and manifest of the newest) is a no-op that returns what is
        stored. Raises RowNotFound where the project has no such job, StaleVersion where a later
        attempt than number `on_behalf` has begun.
        """

    async def checkpoints(self, job_id: str) -> Sequence[SavedCheckpoint]:
        """Those that are kept, newest first."""

    async def observations(
        self, markets: Collection[str], since: datetime, limit: int = 2000
    ) -> Sequence[Observation]:
        """What was seen of these markets from then on, oldest first; of more than `limit` the
        newest.
        """

    async def tallies(self, since: datetime) -> Sequence[MarketTally]:
        """Everything seen from then on but prices, summed up by market and kind, in that order."""

    async def forget_observations(self, before: datetime) -> None: ...
    async def put_host(self, host: Host) -> None:
        """Insert or replace; what is held on it stays held, even where the host has become
        smaller.
        """

    async def hosts(self) -> Sequence[Host]: ...
    async def allocations(self, host: str | None = None) -> Sequence[Allocation]: ...
    async def put_secret(self, secret: SealedSecret) -> None: ...
    async def secrets(self, project: str) -> Sequence[SealedSecret]: ...
    async def delete_secret(self, project: str, name: str) -> None:
        """Raises RowNotFound."""

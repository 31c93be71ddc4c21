"""What callers of the store pass and get, and the errors of the store.

Errors:

* StoreError
  + StaleVersion        another writer stored a newer version first; read again
  + RowNotFound         no such row (in this project)
  + NameConflict        the name is taken
  + DependencyMissing   a new job waits for a job that does not exist
  + HashMismatch        bytes do not match their hash, or a document cannot be read back; do not
                        send it again
  + AllocationConflict  another gang holds the devices, CPUs or memory
  + StoreFull           the disk or database is full; nothing was written
  + LeaseLost           another server works with the database now; stop working with it
  + StoreUnusable       the database is newer than this program, damaged or unreachable; a person
                        must act
"""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

from cavvy.domain.allocations import Allocation
from cavvy.domain.events import Charge, Event
from cavvy.domain.figures import FigureBlock, StepValues
from cavvy.domain.jobs import FAR, Attempt, AttemptPhase, JobPhase, JobRecord, Node
from cavvy.domain.machines import NamedMachine
from cavvy.domain.markets import Observation
from cavvy.domain.units import Money
from cavvy.domain.values import Struct, field, view

# The number of waiting jobs that one pass over the queue reads for each machine: the next job, and
# some more for which a reason is shown. These jobs do not count toward the limit for other jobs,
# because a machine may be busy for days.
PER_MACHINE = 4

# Which projects' rows a query reads: those of the project with this name, or of the projects in a
# collection. None means all projects; only the control plane, and routes whose caller may see all
# projects, pass None.
ProjectFilter = str | Collection[str] | None


def is_visible(project: str, projects: ProjectFilter) -> bool:
    """Return whether a filter selects a project."""
    return projects is None or (
        project == projects if isinstance(projects, str) else project in projects
    )


class StoreError(Exception):
    """Base class of all errors that a store raises."""


class StaleVersion(StoreError):
    """Raised if another writer stored a newer version of the row first; read the row again."""


class RowNotFound(StoreError):
    """Raised if the project does not contain the row."""


class NameConflict(StoreError):
    """Raised if the name is already in use."""


class DependencyMissing(StoreError):
    """Raised if a new job waits for a job that the project does not have."""


class ProjectArchived(StoreError):
    """Raised if nothing new can start in the project because the project is archived."""


class ProjectBusy(StoreError):
    """Raised if the project has work that has not ended. The message names some of the unfinished
    work.
    """


class SignInConflict(StoreError):
    """Raised if the ID token was used before, or if its account cannot sign in. The message states
    whether the token or the account caused the conflict.
    """


class HashMismatch(StoreError):
    """Raised if bytes do not match their hash, or if a document could not be read back after it was
    stored. To send the same data again does not help."""


class AllocationConflict(StoreError):
    """Raised if another gang holds the devices, or if the CPUs or memory do not suffice."""


class StoreFull(StoreError):
    """Raised if the disk or database is full; nothing was written."""


class LeaseLost(StoreError):
    """Raised if another server has taken over the work with this database; nothing was written."""


class StoreUnusable(StoreError):
    """Raised if the database cannot be used until a person acts. The message suggests a remedy."""


class KeyUnusable(StoreUnusable):
    """Raised if a key of secrets or stored files is missing or wrong, or if the data that the key
    encrypted is damaged.
    """


class OwnWrite(NamedTuple):
    """A statement that writes to a table of a capability."""

    sql: str
    values: Sequence[object]


class AtomicWrite(Struct, frozen=True, kw_only=True):
    """Rows that are written together or not at all. Each row has the version that it had when it
    was read, or 0 if the row is new.

    The store increases the version by 1. The store raises StaleVersion and writes nothing if the
    stored version differs, if a new row exists already, or if an update changes a row's project or
    a job's name. The store raises RowNotFound if the parent (job, attempt, host) of a row does not
    exist.

    Rows are written in this order: `release`, jobs, attempts, nodes, machines, charges, events,
    observations, own (of capabilities), figures, allocations. If an attempt renames its gang, a
    later attempt in this write can use the gang's old name. `release` names gangs whose allocations
    are removed. `charges` contains all charges so far of each listed node; these charges replace
    the node's stored charges. Allocations are checked in the same transaction against their host
    and the host's other allocations.
    """

    jobs: Sequence[JobRecord] = ()
    attempts: Sequence[Attempt] = ()
    nodes: Sequence[Node] = ()
    events: Sequence[Event] = ()
    charges: Sequence[Charge] = ()
    allocations: Sequence[Allocation] = ()
    release: Sequence[str] = ()
    observations: Sequence[Observation] = ()
    machines: Sequence[NamedMachine] = ()
    own: Sequence[OwnWrite] = ()
    figures: Sequence[FigureBlock] = ()  # of one minute each
    steps: Sequence[StepValues] = ()  # for capabilities, which listen to them


class JobReading(Struct, frozen=True, kw_only=True):
    """A job with its attempts, and the nodes of each attempt that was read with its nodes."""

    job: JobRecord
    attempts: Sequence[Attempt]
    nodes: Mapping[str, Sequence[Node]]  # by the attempt's ID, sorted by rank


class RankReading(NamedTuple):
    """The row of a node, and the versions of its attempt and its job."""

    node: Node
    phase: AttemptPhase
    attempt_version: int
    job_version: int


class JobSummary(Struct, frozen=True, kw_only=True):
    """A job without its task, for lists of jobs. A summary can be read without decoding
    documents."""

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
    place: str | None  # key of the offer of the latest attempt
    spent: Money
    held: bool  # whether the job waits for other jobs, its schedule or window, not in the queue
    machine: str | None = None  # name of the machine that the job runs on
    tags: dict[str, str] = field(default_factory=dict)


class LedgerFilter(Struct, frozen=True, kw_only=True):
    """Selects the ledger's entries that meet all given conditions: the period from `since` up to,
    but not including, `until`; the projects; the user; a tag (name and value); and the name of a
    service, for the entries of its replicas. None means no condition.
    """

    projects: ProjectFilter = None
    user: str | None = None
    tag: tuple[str, str] | None = None
    service: str | None = None
    since: datetime | None = None
    until: datetime | None = None


def summarize(job: JobRecord, place: str | None, spent: Money) -> JobSummary:
    """Build the summary of a job that was read together with its task."""
    return view(
        JobSummary,
        job,
        priority=job.task.priority,
        place=place,
        spent=spent,
        held=job.not_before == FAR,
        machine=job.task.machine,
        tags=job.task.tags,
    )


class SummaryPage(Struct, frozen=True, kw_only=True):
    """A page of job summaries, newest first. Pass `cursor` to request the next page; `cursor` is
    None on the last page.
    """

    jobs: Sequence[JobSummary]
    cursor: str | None


def make_page(found: Sequence[JobSummary], limit: int) -> SummaryPage:
    """Build a page of at most `limit` summaries. If a next page exists, `found` must contain one
    more summary than `limit`.
    """
    more = 0 < limit < len(found)
    return SummaryPage(jobs=found[:limit], cursor=found[limit - 1].id if more else None)


class Recipe(Struct, frozen=True, kw_only=True):
    """A task file that the members of a project share, and the account that has written it."""

    project: str
    name: str
    text: str
    account: str
    updated_at: datetime


class SealedSecret(Struct, frozen=True, kw_only=True):
    """A secret's name and its encrypted value. The store never receives the plain text."""

    project: str
    name: str
    sealed: bytes
    updated_at: datetime

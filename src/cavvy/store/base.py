"""The interface of a store, and its errors.

Errors:

* StoreError
  + StaleVersion        another writer stored a newer version first; read again
  + RowNotFound         no such row (in this project)
  + NameConflict        the name is taken
  + HashMismatch        bytes do not match their hash, or a document cannot be read back; do not
                        send it again
  + AllocationConflict  another gang holds the devices, CPUs or memory
  + StoreFull           the disk or database is full; nothing was written
  + LeaseLost           another server works with the database now; stop working with it
  + StoreUnusable       the database is newer than this program, damaged or unreachable; a person
                        must act
"""

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Protocol

from cavvy.domain.accounts import Account, AccountCredential, AccountToken, Project, RoleBinding
from cavvy.domain.allocations import Allocation, Host
from cavvy.domain.audit import AuditEntry, AuditOutcome, ChainHead, SealedRecord
from cavvy.domain.checkpoints import SavedCheckpoint
from cavvy.domain.events import Charge, Event
from cavvy.domain.jobs import FAR, Attempt, JobPhase, JobRecord, Node
from cavvy.domain.ledger import LedgerLine, LedgerSum, MonthDiscounts
from cavvy.domain.machines import NamedMachine
from cavvy.domain.markets import MarketTally, Observation
from cavvy.domain.policies import PolicyBook, ProjectPolicy
from cavvy.domain.provider_state import ProviderDocument
from cavvy.domain.units import Money
from cavvy.domain.values import Struct, field
from cavvy.store.parts import (
    ArchiveStore,
    BudgetStore,
    CredentialStore,
    MeterStore,
    QueuedCallStore,
    ServiceStore,
    SignInStore,
)

# The number of waiting jobs that one pass over the queue reads for each machine: the next job, and
# some more for which a reason is shown. These jobs do not count toward the limit for other jobs,
# because a machine may be busy for days.
PER_MACHINE = 4

# Which projects' rows a query reads: those of the project with this name, or of the projects in a
# collection. None means all projects; only the control plane, and routes whose caller may see all
# projects, pass None.
ProjectFilter = str | Collection[str] | None


class StoreError(Exception):
    """Base class of all errors that a store raises."""


class StaleVersion(StoreError):
    """Raised if another writer stored a newer version of the row first; read the row again."""


class RowNotFound(StoreError):
    """Raised if the project does not contain the row."""


class NameConflict(StoreError):
    """Raised if the name is already in use."""


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


class AtomicWrite(Struct, frozen=True, kw_only=True):
    """Rows that are written together or not at all. Each row has the version that it had when it
    was read, or 0 if the row is new.

    The store increases the version by 1. The store raises StaleVersion and writes nothing if the
    stored version differs, if a new row exists already, or if an update changes a row's project or
    a job's name. The store raises RowNotFound if the parent (job, attempt, host) of a row does not
    exist.

    Rows are written in this order: `release`, jobs, attempts, nodes, machines, charges, events,
    observations, allocations. If an attempt renames its gang, a later attempt in this write can use
    the gang's old name. `release` names gangs whose allocations are removed. `charges` contains all
    charges so far of each listed node; these charges replace the node's stored charges. Allocations
    are checked in the same transaction against their host and the host's other allocations.
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
    held: bool  # whether the job waits for its schedule or window instead of in the queue
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


class SealedSecret(Struct, frozen=True, kw_only=True):
    """A secret's name and its encrypted value. The store never receives the plain text."""

    project: str
    name: str
    sealed: bytes
    updated_at: datetime


class Store(Protocol):
    """A store of jobs and of the rows that belong to jobs. Methods that read rows of one project
    take the project's name; methods that list rows of several projects take a ProjectFilter.
    """

    async def open(self) -> None:
        """Create or migrate the schema. Raises StoreUnusable."""

    async def close(self) -> None: ...
    async def installation(self) -> str:
        """Return the random ID of this installation. It never changes."""

    async def fact(self, key: str) -> str | None:
        """Return a fact of the installation, or None if it is not stored."""

    async def put_fact(self, key: str, value: str) -> None:
        """Store a fact of the installation, or replace it."""

    async def commit(self, changes: AtomicWrite) -> None:
        """Write all rows or none. Raises StaleVersion, RowNotFound, NameConflict,
        AllocationConflict, StoreFull.
        """

    async def submit(self, job: JobRecord, event: Event) -> JobRecord:
        """Insert a new job under `job.name` or, if that name is in use, under the first free name
        of NAME-2, NAME-3 and so on. Return the job as stored.
        """

    async def job(self, job_id: str) -> JobRecord: ...
    async def find_job(self, project: str, name_or_id: str) -> JobRecord:
        """Return the job of this project that has exactly this name or ID, or else the replica
        that `name_or_id` means as SERVICE-NUMBER. Raises RowNotFound.
        """

    async def list_jobs(
        self,
        project: ProjectFilter,
        phases: Collection[JobPhase] = (),
        cursor: str | None = None,
        limit: int = 50,
    ) -> SummaryPage: ...
    async def count_jobs(self, project: ProjectFilter) -> dict[JobPhase, int]: ...
    async def waiting(
        self, now: datetime, limit: int, per_machine: int = PER_MACHINE
    ) -> Sequence[JobRecord]:
        """Return the queued jobs that may start, because `not_before` has passed and no stop is
        requested. The jobs are sorted by priority, highest first, and then by ID. At most `limit`
        jobs without a machine are returned, and at most `per_machine` jobs of each machine.
        """

    async def next_waiting(self, now: datetime) -> datetime | None:
        """Return the earliest `not_before` after `now` among queued jobs, or None."""

    async def queue_position(self, job: JobRecord, now: datetime | None = None) -> int:
        """Return the position of a job in the queue of all projects: 1 for the next job to start, 0
        for a job that is not queued. If `now` is given, only jobs that may start at the time `now`
        are counted.
        """

    async def snapshots(self) -> Collection[str]:
        """Return the content hashes of the working-folder snapshots of all jobs. Garbage collection
        must keep the blobs of these snapshots.
        """

    async def unfinished(self) -> Sequence[str]:
        """Return the IDs of the jobs that have not ended or have an unfinished attempt."""

    async def live_versions(self) -> dict[str, int]:
        """Return the version of each job that has not ended, by job ID."""

    async def attempts(self, job_id: str) -> Sequence[Attempt]: ...
    async def attempt_of_gang(self, gang: str) -> Attempt:
        """Return the attempt with this gang. Raises RowNotFound."""

    async def open_attempts(self, project: ProjectFilter = None) -> Sequence[Attempt]:
        """Return all attempts that have not ended, and therefore may cost money now."""

    async def kept_attempts(self) -> Sequence[Attempt]:
        """Return all attempts whose gangs are kept warm for other jobs."""

    async def gang_spent(self, gang: str) -> Money:
        """Return the total charges for the gang with this name, over all attempts that used the
        gang."""

    async def machine(self, project: str, name: str) -> NamedMachine:
        """Return the machine with this name. Raises RowNotFound."""

    async def machines(self, project: ProjectFilter = None) -> Sequence[NamedMachine]:
        """Return the machines, sorted by project and name."""

    async def jobs_of_machine(self, project: str, name: str) -> Sequence[str]:
        """Return the IDs of the machine's unfinished jobs, oldest first."""

    async def delete_machine(self, machine: NamedMachine) -> None:
        """Delete a machine's row. Raises StaleVersion."""

    async def nodes(self, attempt_id: str) -> Sequence[Node]:
        """Return the nodes of an attempt, sorted by rank."""

    async def node(self, attempt_id: str, rank: int) -> Node: ...
    async def events(self, job_id: str, after: int = 0, limit: int = 1000) -> Sequence[Event]:
        """Return the events with an id above `after`, oldest first."""

    async def charges(self, job_id: str) -> Sequence[Charge]:
        """Return the job's charges, sorted by attempt, rank and time."""

    async def spent(self, project: str, since: datetime | None = None) -> Money:
        """Return the sum of the project's entries in the ledger. If `since` is given, only entries
        at `since` or later are counted.
        """

    async def sum_ledger(self, which: LedgerFilter, by: Sequence[str]) -> Sequence[LedgerSum]:
        """Return the sums of the ledger's entries for each combination of values of the dimensions
        `by`, the largest sum first. If an entry extends beyond the period, only its part inside the
        period is counted. `by` contains names of `ledger.DIMENSIONS`, month, tags (as JSON) or
        tag:NAME.
        """

    async def ledger_lines(
        self, which: LedgerFilter, *, after: int = 0, limit: int = 1000
    ) -> Sequence[LedgerLine]:
        """Return the entries that overlap the period and whose number is above `after`, sorted by
        number.
        """

    async def post_discounts(self, discounts: MonthDiscounts) -> int:
        """Post the total amount of each discount in a month. If an amount was posted earlier, only
        the difference is added to the ledger. If an earlier posting is for a discount that
        `discounts` does not contain, the posting is reversed. Returns the number of new entries.
        Raises RowNotFound.
        """

    async def remove_job(self, job: JobRecord) -> None:
        """Delete an ended job with its events, nodes and checkpoints. The job's charges are kept,
        and its name can be used again. Raises StaleVersion.
        """

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

    async def checkpoints(self, job_id: str) -> Sequence[SavedCheckpoint]:
        """Return the job's checkpoints, newest first."""

    async def forget_checkpoints(self, job_id: str) -> None:
        """Delete the rows of the job's checkpoints. The caller must delete the files."""

    async def observations(
        self, markets: Collection[str], since: datetime, limit: int = 2000
    ) -> Sequence[Observation]:
        """Return the observations of these markets at `since` or later, oldest first. If there are
        more than `limit` rows, only the newest rows are returned.
        """

    async def tallies(self, since: datetime) -> Sequence[MarketTally]:
        """Return the sums of the observations that were made at `since` or later. Observations of
        prices are left out. The result has one sum for each market and kind, sorted by market and
        then by kind.
        """

    async def forget_observations(self, before: datetime) -> None: ...
    async def put_host(self, host: Host) -> None:
        """Insert or replace the host. The host's allocations are kept, even if they no longer
        fit."""

    async def hosts(self) -> Sequence[Host]: ...
    async def allocations(self, host: str | None = None) -> Sequence[Allocation]: ...
    async def put_secret(self, secret: SealedSecret) -> None: ...
    async def secrets(self, project: str) -> Sequence[SealedSecret]: ...
    async def all_secrets(self) -> Sequence[SealedSecret]:
        """Return the secrets of all projects, sorted by project and name."""

    async def reseal_secret(self, secret: SealedSecret, sealed: bytes) -> bool:
        """Replace the encrypted value of a secret. Return False if the stored value is no longer
        `secret.sealed`.
        """

    async def delete_secret(self, project: str, name: str) -> None:
        """Delete a secret. Raises RowNotFound."""

    @property
    def provider_credentials(self) -> CredentialStore:
        """The credentials of projects at providers."""

    async def record(self, entry: AuditEntry) -> ChainHead:
        """Append a record to the audit log, and return the new end of the chain."""

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

    async def credential(self, digest: str) -> AccountCredential | None:
        """Return the token whose SHA-256 in hexadecimal is `digest`, with its account and roles."""

    async def use_token(self, token_id: str, at: datetime) -> None:
        """Record the time of a token's last use."""

    async def add_account(self, account: Account) -> None:
        """Raises NameConflict."""

    async def accounts(self) -> Sequence[Account]: ...
    async def disable_account(self, name: str, at: datetime | None) -> None:
        """Disable an account at the time `at` or, if `at` is None, enable it. Raises
        RowNotFound.
        """

    async def remove_account(self, name: str) -> None:
        """Delete an account with its tokens and roles. Raises RowNotFound."""

    async def add_token(self, token: AccountToken, digest: str) -> None:
        """Store a token by its hash. Raises RowNotFound if the token's account does not exist."""

    async def tokens(self, account: str | None = None) -> Sequence[AccountToken]:
        """Return the tokens of one account or of all accounts, including expired and revoked
        tokens."""

    async def revoke_token(self, token_id: str, account: str | None, at: datetime) -> None:
        """Revoke a token. If `account` is not None, the token must belong to this account. Raises
        RowNotFound.
        """

    async def add_project(self, project: Project, *, adopt: bool) -> None:
        """Store a new project. Jobs, machines, secrets or roles may already use the project's name.
        Then `adopt` must be set, because people with a role in the parent get this role for these
        rows, too. Raises NameConflict, and RowNotFound if the parent does not exist.
        """

    async def move_project(self, former: Project, parent: str | None) -> None:
        """Move a created project below another project or, if `parent` is None, to the top. Raises
        RowNotFound if the parent does not exist, or if the project has moved since `former` was
        read. Raises NameConflict if `parent` is the project itself or a project below it.
        """

    @property
    def archive(self) -> ArchiveStore:
        """Archives projects."""

    async def projects(self) -> Sequence[Project]:
        """Return all created projects, and the projects that exist only because jobs name them."""

    @property
    def sign_ins(self) -> SignInStore:
        """Trusted issuers, and sign-ins with their ID tokens."""

    async def policies(self) -> PolicyBook:
        """Return the policies of all projects."""

    async def put_policy(self, project: str, policy: ProjectPolicy | None) -> None:
        """Replace the policy of a project or of the INSTALLATION or, if `policy` is None, delete
        it.
        """

    @property
    def budgets(self) -> BudgetStore:
        """Budgets, and the alerts that were sent for them."""

    @property
    def meters(self) -> MeterStore:
        """Bills of volumes, and the divided bills of replicas."""

    @property
    def services(self) -> ServiceStore:
        """Services, each with its replicas."""

    @property
    def queued_calls(self) -> QueuedCallStore:
        """Calls in the queues of services."""

    async def grant_role(self, binding: RoleBinding) -> None:
        """Store a role; an existing role is not changed. Raises RowNotFound if the account does not
        exist.
        """

    async def revoke_role(self, binding: RoleBinding) -> None:
        """Delete a role. Raises RowNotFound."""

    async def roles(self, project: str | None = None) -> Sequence[RoleBinding]:
        """Return the roles that were granted in this project itself or, without `project`, in all
        projects.
        """

    async def provider_documents(
        self, provider: str, collection: str, name: str | None = None
    ) -> Sequence[ProviderDocument]:
        """Return the provider's documents in a collection, sorted by name."""

    async def swap_provider_document(
        self, provider: str, document: ProviderDocument, *, delete: bool = False
    ) -> bool:
        """Write or delete a document, if its stored version is `document.version` - 1 (0 if it is
        not stored yet). If the stored version differs, return False and change nothing.
        """

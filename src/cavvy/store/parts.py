"""The interfaces of the parts of a store. Each part is an attribute of `Store`. `store.base`
defines their errors.
"""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Protocol

from cavvy.domain.accounts import AccountToken
from cavvy.domain.budgets import ChargedRate, SpendingBudget
from cavvy.domain.credentials import CredentialBook, SealedCredential
from cavvy.domain.ledger import LedgerPosting
from cavvy.domain.queued_calls import CallState, QueuedCall
from cavvy.domain.request_bills import DividedBill, ReplicaBill
from cavvy.domain.stored_services import StoredService
from cavvy.domain.trusts import IssuerTrust, SignIn
from cavvy.domain.volumes import VolumeBill, VolumeOwner, VolumeUse

if TYPE_CHECKING:
    from cavvy.store.base import ProjectFilter


class SignInStore(Protocol):
    """Trusted issuers, and sign-ins with their ID tokens."""

    async def trusts(self) -> Sequence[IssuerTrust]:
        """Return the trusted issuers, whose ID tokens are accepted, sorted by name."""

    async def put_trust(self, trust: IssuerTrust, *, replace: bool = False) -> None:
        """Store a trust. Raises NameConflict if a trust has this name, unless `replace` is set."""

    async def delete_trust(self, name: str) -> None:
        """Delete a trust, and the tokens and roles that the trust granted. Raises RowNotFound."""

    async def identity(self, issuer: str, subject: str) -> str | None:
        """Return the account of a person, or None if the person has never signed in."""

    async def sign_in(
        self, found: SignIn, token: AccountToken, digest: str, id_token: str, until: datetime
    ) -> None:
        """Store the token of a sign-in under its hash `digest`. A person's account is created or
        linked at the first sign-in. The roles of the person's groups replace the roles from earlier
        sign-ins with this trust. `id_token` is the hash of the ID token, which is kept at least
        until the time `until`. Raises SignInConflict, also if the person has signed in with an ID
        token that was issued later.
        """


class CredentialStore(Protocol):
    """The encrypted credentials of projects at providers."""

    async def book(self) -> CredentialBook:
        """Return which projects have credentials for which providers."""

    async def list(self) -> Sequence[SealedCredential]:
        """Return the credentials of all projects, sorted by project and provider."""

    async def put(self, credential: SealedCredential) -> None:
        """Insert or replace a credential."""

    async def reseal(self, credential: SealedCredential, sealed: bytes) -> bool:
        """Like `Store.reseal_secret`."""

    async def delete(self, project: str, provider: str) -> None:
        """Delete a credential. Raises RowNotFound."""


class BudgetStore(Protocol):
    """Budgets, and the alerts that were sent for them."""

    async def list(self) -> Sequence[SpendingBudget]:
        """Return all budgets, sorted by name."""

    async def put(self, budget: SpendingBudget) -> None:
        """Insert or replace the budget of this name."""

    async def swap(self, before: SpendingBudget, budget: SpendingBudget) -> bool:
        """Replace the budget `before`. Returns False if the stored budget has changed since it was
        read."""

    async def delete(self, name: str) -> None:
        """Delete a budget. Raises RowNotFound."""

    async def claim_alert(self, budget: str, month: datetime, percent: int) -> bool:
        """Record that an alert is being sent. Returns False if the alert was recorded before."""

    async def forget_alerts(self, budget: str, month: datetime, above: int) -> None:
        """Delete the records of the month's alerts for shares above this percentage."""

    async def charged_rates(self) -> Mapping[str, ChargedRate]:
        """Return, keyed by job ID, the hourly rates of the gangs that may still cost money,
        according to their newest charges.
        """


class ArchiveStore(Protocol):
    """Archived projects. No job and no service can be stored in an archived project. A submission
    that arrives during the archiving is either stored before the project is archived, or raises
    ProjectArchived.
    """

    async def put(self, projects: Collection[str], at: datetime, *, busy: bool = False) -> None:
        """Archive created projects; projects that are already archived are not changed. Raises
        ProjectBusy if `busy` is not set and the projects have services, unfinished jobs or
        unfinished gangs.
        """

    async def check(self, project: str) -> None:
        """Raises ProjectArchived."""

    async def lift(self, project: str) -> None:
        """Restore an archived project, with the projects below it that were archived at the same
        time. Does nothing if the project is not archived. Raises ProjectArchived if the project's
        parent is archived.
        """


class ServiceStore(Protocol):
    """Services, each with its replicas."""

    async def get(self, project: str, name: str) -> StoredService:
        """Return the service with this name. Raises RowNotFound."""

    async def list(self, projects: "ProjectFilter" = None) -> Sequence[StoredService]:
        """Return the services, sorted by project and name."""

    async def put(self, service: StoredService) -> StoredService:
        """Insert the service (if its version is 0) or replace it, and return the stored service.
        Raises StaleVersion.
        """

    async def delete(self, service: StoredService) -> None:
        """Delete a service. Raises StaleVersion."""


class MeterStore(Protocol):
    """Bills of volumes, and divided bills of replicas (see `store/meters.py`)."""

    async def volumes(self) -> Sequence[VolumeBill]: ...
    async def owner(self, gang: str) -> VolumeOwner | None: ...
    async def uses(self, gangs: Collection[str]) -> Mapping[str, Sequence[VolumeUse]]: ...
    async def put_volume(self, bill: VolumeBill, postings: Sequence[LedgerPosting]) -> VolumeBill:
        """Raises StaleVersion."""

    async def replica_bills(self, jobs: Collection[str]) -> Sequence[ReplicaBill]: ...
    async def late_replicas(self) -> Sequence[str]: ...
    async def divide(
        self,
        divided: DividedBill,
        postings: Mapping[str, Sequence[LedgerPosting]],
        labels: Mapping[str, str],
    ) -> None:
        """Raises StaleVersion."""


class QueuedCallStore(Protocol):
    """Calls in the queues of services; see `store/queued_calls.py`."""

    async def add(
        self, calls: Sequence[tuple[QueuedCall, bytes]], once: QueuedCall | None = None
    ) -> Sequence[str]: ...
    async def get(self, project: str, service: str, call_id: str) -> QueuedCall:
        """Raises RowNotFound."""

    async def bodies(self, call: QueuedCall) -> tuple[bytes, bytes]: ...
    async def due(
        self, project: str, service: str, limit: int, skip: Collection[str] = ()
    ) -> Sequence[QueuedCall]: ...
    async def put(self, call: QueuedCall, answer: bytes = b"") -> QueuedCall:
        """Raises StaleVersion."""

    async def list(
        self,
        project: str,
        service: str,
        state: CallState | None = None,
        *,
        after: str = "",
        limit: int = 100,
    ) -> Sequence[QueuedCall]: ...
    async def count(self, project: str, service: str) -> Mapping[CallState, int]: ...
    async def has_waiting(self, project: str, service: str, count: int) -> bool: ...
    async def purge(self, project: str, service: str, state: CallState, now: datetime) -> int: ...
    async def expire(self, now: datetime) -> None: ...

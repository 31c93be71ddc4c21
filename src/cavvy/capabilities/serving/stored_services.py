"""Services that users start and stop. A service has a task, the replicas that currently run the
task, and keys, each with the time of its last use."""

from collections.abc import Mapping
from datetime import UTC, datetime
from enum import StrEnum

from cavvy.capabilities.serving.replicas import (
    CandidateRevision,
    ReplicaState,
    ServiceReplica,
    ServingMarket,
    UnplacedRequests,
    UpdateOutcome,
)
from cavvy.domain.jobs import RunOrigin
from cavvy.domain.services import ServiceSpec
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.units import Money
from cavvy.domain.values import Struct, field, replace

KEPT_ENDED = 10  # maximum number of ended replicas that are stored with a service


class KeyPriority(StrEnum):
    """Whose waiting requests start first, and whose are refused last; the first one is the
    lowest."""

    LOW = "low"
    NORMAL = "normal"
    HIGH = "high"


class ServiceKey(Struct, frozen=True, kw_only=True):
    """A key that permits calls to a service. Only the key's SHA-256 is stored, which is safe
    because a key has 256 random bits. `per_s` and `burst` limit the key's rate, and
    `tokens_per_min` its tokens of language models; if they are None, only the service's limits
    apply. `micros_per_day` limits the cost of its requests on a day in UTC. While requests wait,
    those of keys with a higher `priority` start first, and keys of one priority are served tokens
    in proportion to `weight`. Requests with the key must not leave the place `residency`; None
    permits all places. `user` created the key.
    """

    id: str
    sha256: str
    label: str = ""
    user: str = ""
    per_s: float | None = None
    burst: int = 1
    tokens_per_min: int | None = None
    micros_per_day: int | None = None
    weight: float = 1.0
    priority: KeyPriority = KeyPriority.NORMAL
    residency: str | None = None
    created_at: datetime
    expires_at: datetime | None = None
    used_at: datetime | None = None  # state at the last write of the service


def find_hosts(spec: ServiceSpec) -> frozenset[str]:
    """Return the host names of a service in lower case."""
    return frozenset(each.lower() for each in spec.hosts)


def find_open_models(spec: ServiceSpec) -> frozenset[str]:
    """Return the models that each client may call without a key."""
    return frozenset() if spec.keys else frozenset(spec.model_names)


class GroupScale(Struct, frozen=True, kw_only=True):
    """The autoscaler's last decision on a group of replicas: the fields `target`, `why` and
    `scaling` of a service, for one group.
    """

    name: str
    target: int = 0
    why: str = ""
    scaling: str = ""


class StoredService(Struct, frozen=True, kw_only=True):
    """A service: a name in a project, the task of its newest revision, and its replicas, oldest
    first. Each replica is a job whose ID is the replica's ID.

    `wanted` is false once the user has ended the service. The service's row is deleted together
    with its last replica. `target` is the number of replicas that the autoscaler last requested,
    `why` is the reason for this number, and `scaling` is the autoscaler's state as JSON. `level`
    contains the counts for the service level, as JSON. For a service on spot, `markets` are the
    markets from which the autoscaler chooses, and `placement` is the number of replicas that each
    of these markets should have. `failures` is the number of consecutive replicas that ended before
    or soon after they were ready. For the last replica that failed, `failed_at` is the time and
    `problem` is the reason. During a trial, `candidate` is the revision under test, and `task` and
    `revision` belong to the serving revision. `outcome` is the result of the last trial. `former`
    is the previous revision, to which a rolling update can return until a replica of the new
    revision is ready. `steady` means that a replica of the serving revision has worked: it was
    ready for a minute, or until it was no longer needed. Until then, `worked` is the last revision
    that has worked. `groups` are the autoscaler's decisions on the groups of a service that has
    groups; `target` is then their sum.
    """

    project: str
    name: str
    id: str
    user: str = ""
    task: TaskSpec
    origin: RunOrigin = RunOrigin()
    revision: int = 1
    created_at: datetime
    consented: bool = False
    ceiling: Money | None = None
    wanted: bool = True
    replicas: tuple[ServiceReplica, ...] = ()
    ordered: int = 0  # number of replicas that were ever requested
    target: int = 0
    why: str = ""
    scaling: str = ""
    groups: tuple[GroupScale, ...] = ()
    level: str = ""
    markets: tuple[ServingMarket, ...] = ()
    placement: dict[str, int] = field(default_factory=dict)
    failures: int = 0
    failed_at: datetime | None = None
    problem: str = ""
    unplaced: tuple[UnplacedRequests, ...] = ()
    keys: tuple[ServiceKey, ...] = ()
    candidate: CandidateRevision | None = None
    former: CandidateRevision | None = None
    steady: bool = False
    worked: CandidateRevision | None = None
    outcome: UpdateOutcome | None = None
    stopped_by: str = ""  # the budget whose hard stop ended the service's replicas
    version: int = 0

    @property
    def spec(self) -> ServiceSpec:
        assert self.task.service is not None
        return self.task.service

    @property
    def serving(self) -> CandidateRevision:
        """The serving revision."""
        return CandidateRevision(
            revision=self.revision,
            task=self.task,
            origin=self.origin,
            user=self.user,
            consented=self.consented,
            ceiling=self.ceiling,
            created_at=self.created_at,
        )

    @property
    def hosts(self) -> frozenset[str]:
        """The host names of the service in lower case. The names that the service will have after
        its candidate takes over, or after it returns to an earlier revision, are included.
        """
        return frozenset[str]().union(*map(find_hosts, self._specs))

    @property
    def open_models(self) -> frozenset[str]:
        """The models that each client may call without a key. The models of the candidate, and of
        the revisions to which the service may return, are included.
        """
        return frozenset[str]().union(*map(find_open_models, self._specs))

    @property
    def _specs(self) -> tuple[ServiceSpec, ...]:
        others = (self.candidate, self.former, self.worked)
        specs = (None if each is None else each.task.service for each in others)
        return (self.spec, *(each for each in specs if each is not None))

    @property
    def newest(self) -> int:
        """The highest revision number of the service."""
        tried = (self.candidate, self.outcome)
        return max(self.revision, *(0 if each is None else each.revision for each in tried))

    @property
    def tried(self) -> int:
        """The number of the revision under test, or 0 if there is none."""
        return 0 if self.candidate is None else self.candidate.revision

    @property
    def open(self) -> tuple[ServiceReplica, ...]:
        """The replicas that have not ended."""
        return tuple(each for each in self.replicas if each.state is not ReplicaState.ENDED)

    @property
    def path(self) -> str:
        """The path under which the gateway serves the service: the part of the URL after the
        address.
        """
        return f"/{self.project}/{self.name}"


MOST_KEYS = 1000


class TooManyKeys(Exception):
    """Raised if the service has the maximum number of keys; revoke another key first."""


class KeyUnknown(Exception):
    """Raised if the service has no key with this ID."""


def with_key(service: StoredService, key: ServiceKey) -> StoredService:
    """Return the service with one more key. Raises TooManyKeys."""
    if len(service.keys) >= MOST_KEYS:
        raise TooManyKeys(f"service {service.name} has {MOST_KEYS} keys, the maximum")
    return replace(service, keys=(*service.keys, key))


def without_key(service: StoredService, key_id: str) -> StoredService:
    """Return the service without the key `key_id`. Raises KeyUnknown."""
    kept = tuple(each for each in service.keys if each.id != key_id)
    if len(kept) == len(service.keys):
        raise KeyUnknown(f"service {service.name} has no key {key_id}")
    return replace(service, keys=kept)


def note_uses(service: StoredService, used: Mapping[str, float]) -> StoredService:
    """Record the times at which the gateway last saw the service's keys, and return the service."""
    if not used:
        return service
    return replace(service, keys=tuple(_note_use(each, used.get(each.id)) for each in service.keys))


def _note_use(key: ServiceKey, seen: float | None) -> ServiceKey:
    if seen is None:
        return key
    at = datetime.fromtimestamp(seen, UTC)
    return replace(key, used_at=at) if key.used_at is None or at > key.used_at else key

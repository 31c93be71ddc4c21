"""The replicas of services with their states, and the revisions that replace one another."""

from collections.abc import Mapping
from datetime import datetime, timedelta
from enum import StrEnum

from cavvy.domain.jobs import RunOrigin
from cavvy.domain.service_updates import CanaryTrial, RevisionSums, UpdateEnd
from cavvy.domain.services import ReplicaRole
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.units import HourlyRate, Money
from cavvy.domain.values import Struct


class ReplicaState(StrEnum):
    """The state of a replica. `REPLICA_MOVES` lists the allowed transitions."""

    # the replica is recorded; the provider may not have received the request yet
    ORDERED = "ordered"
    STARTING = "starting"  # the replica's node is starting, or its program does not answer yet
    READY = "ready"  # the replica answers its probe and gets requests
    UNHEALTHY = "unhealthy"  # the replica no longer answers its probe and gets no requests
    DRAINING = "draining"  # the replica gets no more requests and finishes its open requests
    ENDING = "ending"  # the replica's node is being removed
    ENDED = "ended"  # the provider no longer has the node, and the replica's bill is closed


# For each state, the states that may follow, with the reason for each.
REPLICA_MOVES: Mapping[ReplicaState, Mapping[ReplicaState, str]] = {
    ReplicaState.ORDERED: {
        ReplicaState.STARTING: "the provider accepted the launch, or the provider listed a node "
        "of the launch",
        ReplicaState.ENDING: "the launch failed or is no longer needed; a node that may exist is "
        "removed",
    },
    ReplicaState.STARTING: {
        ReplicaState.READY: "the replica answered its probe for the first time",
        ReplicaState.ENDING: "the replica did not answer in time, its node was lost, or the "
        "service no longer needs the replica",
    },
    ReplicaState.READY: {
        ReplicaState.UNHEALTHY: "the replica failed its probe too often in a row",
        ReplicaState.DRAINING: "fewer replicas are needed, a new revision replaces the replica, "
        "or the replica's node will be reclaimed",
        ReplicaState.ENDING: "the replica's node was lost",
    },
    ReplicaState.UNHEALTHY: {
        ReplicaState.READY: "the replica answered its probe again",
        ReplicaState.ENDING: "the replica did not recover, its node was lost, or the service no "
        "longer needs the replica",
    },
    ReplicaState.DRAINING: {
        ReplicaState.READY: "the replica is needed again, and its node will not be reclaimed",
        ReplicaState.ENDING: "the replica's requests ended, the time limit for draining has "
        "passed, or the replica's node was lost",
    },
    ReplicaState.ENDING: {ReplicaState.ENDED: "the provider no longer has the replica's node"},
    ReplicaState.ENDED: {},
}

ROLE_TAG = "role"  # for a replica's job: the name of its group


def name_replica(service: str, number: int) -> str:
    """Return the name of a replica's job. Names of other jobs contain no dot, so a replica never
    takes a name of a job or of its reruns."""
    return f"{service}.{number}"


# states in which a replica may get requests
SERVING = frozenset({ReplicaState.READY})

# states of replicas that will serve without a further decision
COMING_REPLICAS = frozenset({ReplicaState.ORDERED, ReplicaState.STARTING})


class ReplicaLoss(StrEnum):
    """What happened to a replica on spot: its node was reclaimed, or its launch was refused."""

    LOST = "lost"  # the replica's node was reclaimed
    REFUSED = "refused"  # there was no capacity for the replica


class ServingMarket(Struct, frozen=True, kw_only=True):
    """A market for replicas and its cheapest price. `place` is the zone or region of a spot market.
    It is "" for on-demand offers: the planner chooses among all of them. `boot_s` is the usual time
    until a machine of the cheapest offer can start a program.
    """

    name: str
    provider: str = ""
    region: str = ""
    place: str = ""
    spot: bool = False
    rate: HourlyRate = HourlyRate(0)
    boot_s: float = 0.0


class UnplacedRequests(Struct, frozen=True, kw_only=True):
    """Requests that must stay in `places`, where the service has no replica. The requests wait
    because the service already has its maximum number of replicas. `places` has the format of
    `place_loads.write_places`. The service may start a replica in `places` only after another
    replica has ended; `instead` is the number of that other replica.
    """

    places: str
    instead: int


class ServiceReplica(Struct, frozen=True, kw_only=True):
    """One replica of a revision of a service. The replica was requested in `market` ("" if the
    planner chose the offer) and runs at `place`. The replica may run at these `providers`; () means
    all providers that its task permits. A time such as `ready_at` is None until the replica reaches
    the corresponding state. `reason` is the reason for the last transition. The replica's program
    listens on `port` of the node. `gang` is the gang that runs the replica. While there is no gang,
    `gang` is "". For a replica on the server's machine, `gang` is always "", because the gateway
    reaches the replica's port without a tunnel.
    """

    id: str
    number: int = 0  # the replica's number among all replicas that the service ever had
    service: str
    revision: int
    market: str = ""
    place: str = ""
    places: tuple[str, ...] = ()  # the names of its region, country and area
    # it was ordered for requests that must stay in all these places
    bound_to: tuple[str, ...] = ()
    account: str = ""  # the provider's account where its gang runs
    rate: HourlyRate = HourlyRate(0)  # what its nodes cost now
    gang: str = ""
    providers: tuple[str, ...] = ()
    state: ReplicaState = ReplicaState.ORDERED
    reason: str = ""
    port: int = 0
    ordered_at: datetime
    placed_at: datetime | None = None  # an offer was found
    claimed_at: datetime | None = None  # its nodes run
    running_at: datetime | None = None  # the replica's program was started
    ready_at: datetime | None = None
    measured: bool = False  # whether the autoscaler has recorded how long the replica's start took
    reclaimed: bool = False  # when the provider announced that it will reclaim the replica's node
    loss: ReplicaLoss | None = None  # how the replica was lost to a spot market, if it was
    counted: bool = False  # whether the autoscaler has recorded the loss
    group: str = ""  # the name of its group, if the service has groups
    role: ReplicaRole | None = None
    members: tuple[str, ...] = ()  # the IDs of the workers with which a router was started
    # of the node: for the bootstrap server of prefill, the metrics of a router, or the events of a
    # replica without a role
    second_port: int = 0
    address: str = ""  # at which the other replicas of its network reach its node

    @property
    def events_port(self) -> int:
        """The port of the node at which the replica publishes changes of its cache, or 0."""
        return self.second_port if self.role is None else 0

    @property
    def is_worker(self) -> bool:
        """Whether the replica belongs to a group that is not its service's router."""
        return self.role not in (None, ReplicaRole.ROUTER)

    @property
    def start_parts(self) -> Mapping[str, timedelta]:
        """The duration of each finished phase of the replica's start: finding an offer, starting
        the machine, preparing the machine (image, files, setup), and loading the program (engine
        and weights).
        """
        times = (self.ordered_at, self.placed_at, self.claimed_at, self.running_at, self.ready_at)
        spans = zip(("queue", "machine", "prepare", "load"), times, times[1:], strict=False)
        return {name: end - begin for name, begin, end in spans if begin and end}

    draining_at: datetime | None = None
    ended_at: datetime | None = None


class RevisionTraffic(Struct, frozen=True, kw_only=True):
    """The counts of the gateway since it started to divide the requests between the serving
    revision and the revision `revision`.
    """

    revision: int
    old: RevisionSums
    new: RevisionSums


class CandidateRevision(Struct, frozen=True, kw_only=True):
    """The revision under test, its terms, and the user who deployed the revision. The revision's
    replicas are stored in the service's list of replicas. `ready_at` is the time when the
    revision's first replica was ready. If `withdrawn` is true, the user has returned the service to
    the old revision.
    """

    revision: int
    task: TaskSpec
    origin: RunOrigin = RunOrigin()
    user: str = ""
    consented: bool = False
    ceiling: Money | None = None
    created_at: datetime
    ready_at: datetime | None = None
    failures: int = 0
    failed_at: datetime | None = None
    problem: str = ""
    trial: CanaryTrial = CanaryTrial()
    withdrawn: bool = False


class UpdateOutcome(Struct, frozen=True, kw_only=True):
    """The result of the last finished trial. `errors` is the share of each revision's requests that
    failed, the old revision first. `slower` is the estimated ratio of the new revision's latency to
    the old revision's latency. A revision is rolled back when `evidence` reaches 1 / alpha.
    """

    revision: int
    end: UpdateEnd
    at: datetime
    requests: int = 0
    errors: tuple[float, float] = (0.0, 0.0)
    slower: float = 1.0
    evidence: float = 1.0
    problem: str = ""

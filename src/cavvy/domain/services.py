"""Services: programs that answer requests on one or more replicas. The module `spec` reads a
`ServiceSpec` from a file.
"""

from collections.abc import Mapping
from datetime import datetime, timedelta
from enum import StrEnum

from cavvy.domain.units import HourlyRate
from cavvy.domain.values import Struct


class TargetKind(StrEnum):
    """What the number of replicas is computed from."""

    # requests shall be on time as often as the service asks
    QUEUE_WAIT = "queue_wait"
    # the requests that one replica works on at once
    CONCURRENCY = "concurrency"
    # the requests per second of one replica
    RATE = "rate"
    # the mean share of time in which the GPUs of the replicas are busy
    GPU_UTILISATION = "gpu_utilisation"
    # the mean of a number that the replicas report
    METRIC = "metric"


class ReplicaTarget(Struct, frozen=True, kw_only=True):
    """What the autoscaler aims at. `value` is in the unit of the kind: requests, requests per
    second, a share of 1, or the unit of the metric; for `QUEUE_WAIT` it is the wait in seconds.
    `metric` names the metric.
    """

    kind: TargetKind = TargetKind.QUEUE_WAIT
    value: float = 10.0
    metric: str | None = None


class ReplicaCount(Struct, frozen=True, kw_only=True):
    """The bounds of the number of replicas, what decides within them, and after which time without
    a request the service goes down to `least`.
    """

    least: int = 0
    most: int = 1
    target: ReplicaTarget = ReplicaTarget()
    idle: timedelta = timedelta(minutes=5)


class ReadinessProbe(Struct, frozen=True, kw_only=True):
    """How to find out whether a replica answers: a GET of `path` is answered with 200 to 399 within
    `timeout`. A replica is asked `every` so often, has `start` for its first answer, and is
    unhealthy after `failures` failures in a row. With `any_status`, every HTTP response counts as
    an answer.
    """

    path: str = "/"
    every: timedelta = timedelta(seconds=10)
    timeout: timedelta = timedelta(seconds=5)
    start: timedelta = timedelta(minutes=20)
    failures: int = 3
    any_status: bool = False


class ServiceTimeouts(Struct, frozen=True, kw_only=True):
    """How long a request may wait for a replica, take until its answer begins, and go without a
    byte in either direction after that.
    """

    queue: timedelta = timedelta(minutes=10)
    response: timedelta = timedelta(minutes=5)
    silence: timedelta = timedelta(minutes=5)


class RateScope(StrEnum):
    """What a limit of the rate counts apart."""

    CLIENT = "client"  # each key, or each address if the service needs no key
    ADDRESS = "address"
    HEADER = "header"  # each value of a header
    SERVICE = "service"  # all requests together


class RequestRate(Struct, frozen=True, kw_only=True):
    """How many requests may come in `per`, and at once (`burst`), to paths below `prefix`."""

    requests: float
    per: timedelta = timedelta(seconds=1)
    burst: int = 1
    each: RateScope = RateScope.CLIENT
    header: str | None = None
    prefix: str = ""

    @property
    def per_s(self) -> float:
        return self.requests / self.per.total_seconds()


class RequestLimits(Struct, frozen=True, kw_only=True):
    """The largest body of a request, and how many requests may wait for a replica."""

    body_mib: int = 1024
    waiting: int = 10_000


class ServiceLevel(Struct, frozen=True, kw_only=True):
    """What the service promises: 95 of 100 requests are answered within `p95`, and `availability`
    is the share of requests that are answered. None if nothing is promised.
    """

    p95: timedelta | None = None
    availability: float | None = None


class UpdateStrategy(StrEnum):
    """How a new revision replaces the one that serves."""

    ROLLING = "rolling"  # its replicas replace the old ones one by one, as they become ready
    CANARY = "canary"  # it gets a part of the requests, and all of them if it is not worse
    BLUE_GREEN = "blue-green"  # it gets all requests at once, when all its replicas are ready


class ServiceUpdate(Struct, frozen=True, kw_only=True):
    """How new revisions take over. A canary gets `weight` percent of the requests. It takes over
    after `requests` of its own, or after `within`, without enough evidence against it.
    """

    strategy: UpdateStrategy = UpdateStrategy.ROLLING
    weight: int = 10
    requests: int = 2000
    within: timedelta = timedelta(hours=1)


class ServiceSpec(Struct, frozen=True, kw_only=True):
    """How a task serves requests. With `fixed_port`, its program listens on `port`; otherwise on
    the port in the variable PORT. OpenAI's clients choose the service by one of its `models`.

    `concurrency` is the number of requests that a replica can work on at once. With `keys`,
    requests need one of the service's keys. A replica that is to end has `drain` for its requests.
    `regions` are where replicas run and `residency` is the area that requests and replicas must not
    leave; () and None permit all. `budget` limits the price of all replicas together.
    With `price_header`, responses say what their requests have cost.
    """

    port: int
    fixed_port: bool = False
    models: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()  # its own host names; (): it has a path of the gateway's
    replicas: ReplicaCount = ReplicaCount()
    concurrency: int = 1
    probe: ReadinessProbe = ReadinessProbe()
    drain: timedelta = timedelta(minutes=2)
    timeouts: ServiceTimeouts = ServiceTimeouts()
    keys: bool = False
    rates: tuple[RequestRate, ...] = ()
    limits: RequestLimits = RequestLimits()
    slo: ServiceLevel = ServiceLevel()
    regions: tuple[str, ...] = ()
    residency: str | None = None
    budget: HourlyRate | None = None
    price_header: bool = False
    update: ServiceUpdate = ServiceUpdate()


class ReplicaState(StrEnum):
    """The state of a replica. `REPLICA_MOVES` has the moves between them."""

    ORDERED = "ordered"  # recorded; the provider may not know it yet
    STARTING = "starting"  # its node starts, or its program does not answer yet
    READY = "ready"  # it answers its probe and gets requests
    UNHEALTHY = "unhealthy"  # it has stopped to answer its probe and gets no requests
    DRAINING = "draining"  # it gets no more requests and finishes those it has
    ENDING = "ending"  # its node is being removed
    ENDED = "ended"  # the provider no longer has it, and its bill is closed


# For each state, the states that may follow, with the reason for each.
REPLICA_MOVES: Mapping[ReplicaState, Mapping[ReplicaState, str]] = {
    ReplicaState.ORDERED: {
        ReplicaState.STARTING: "the provider accepted the launch, or its node was found",
        ReplicaState.ENDING: "the launch failed or is no longer needed; a node that may exist is "
        "removed",
    },
    ReplicaState.STARTING: {
        ReplicaState.READY: "it answered its probe for the first time",
        ReplicaState.ENDING: "it did not answer in time, its node was lost, or it is no longer "
        "needed",
    },
    ReplicaState.READY: {
        ReplicaState.UNHEALTHY: "it failed its probe too often in a row",
        ReplicaState.DRAINING: "fewer replicas are needed, a new revision replaces it, or its node "
        "will be reclaimed",
        ReplicaState.ENDING: "its node was lost",
    },
    ReplicaState.UNHEALTHY: {
        ReplicaState.READY: "it answered its probe again",
        ReplicaState.ENDING: "it did not recover, its node was lost, or it is no longer needed",
    },
    ReplicaState.DRAINING: {
        ReplicaState.READY: "it is needed again, and its node was not going to be reclaimed",
        ReplicaState.ENDING: "its requests ended, the time for them is over, or its node was lost",
    },
    ReplicaState.ENDING: {ReplicaState.ENDED: "the provider no longer has its node"},
    ReplicaState.ENDED: {},
}
SERVICE_TAG = "service"  # of a replica's job: the name of its service
# The provider of the server's machine. Its replicas share the machine's ports with the gateway.
HERE = "local"

# states in which a replica may get requests
SERVING = frozenset({ReplicaState.READY})
# states of replicas that will serve without a further decision
COMING_REPLICAS = frozenset({ReplicaState.ORDERED, ReplicaState.STARTING})


class ReplicaLoss(StrEnum):
    """What a spot market did to a replica."""

    LOST = "lost"  # its node was reclaimed
    REFUSED = "refused"  # there was no capacity for it


class ServingMarket(Struct, frozen=True, kw_only=True):
    """A market for replicas and its cheapest price. `place` is the zone or region of a spot market;
    "" for on-demand offers, among which the planner chooses.
    """

    name: str
    provider: str = ""
    region: str = ""
    place: str = ""
    spot: bool = False
    rate: HourlyRate = HourlyRate(0)


class ServiceReplica(Struct, frozen=True, kw_only=True):
    """One replica of a revision of a service. It was ordered in `market` ("" if the planner chose)
    and runs at `place`; it may run at these `providers` ((): at all that its task permits). Times
    are None until they happened. `reason` is the reason of the last move. Its program listens on
    `port` of its node. `gang` is the gang that runs it; "" while there is none, and on the server's
    machine, where the gateway needs no tunnel to reach the port.
    """

    id: str
    number: int = 0  # among all replicas that the service ever had
    service: str
    revision: int
    market: str = ""
    place: str = ""
    rate: HourlyRate = HourlyRate(0)  # what its nodes cost now
    gang: str = ""
    providers: tuple[str, ...] = ()
    state: ReplicaState = ReplicaState.ORDERED
    reason: str = ""
    port: int = 0
    ordered_at: datetime
    placed_at: datetime | None = None  # an offer was found
    claimed_at: datetime | None = None  # its nodes run
    running_at: datetime | None = None  # its program was started
    ready_at: datetime | None = None
    measured: bool = False  # the autoscaler knows how long its start took
    reclaimed: bool = False  # its provider has announced that it will take its node back
    loss: ReplicaLoss | None = None  # what its spot market did to it
    counted: bool = False  # the autoscaler knows of the loss

    @property
    def start_parts(self) -> Mapping[str, timedelta]:
        """How long each part of its start took, as far as they have ended: to find an offer, to
        start the machine, to prepare it (image, files, setup), and to load the program until it
        answered (engine and weights).
        """
        times = (self.ordered_at, self.placed_at, self.claimed_at, self.running_at, self.ready_at)
        spans = zip(("queue", "machine", "prepare", "load"), times, times[1:], strict=False)
        return {name: end - begin for name, begin, end in spans if begin and end}

    draining_at: datetime | None = None
    ended_at: datetime | None = None

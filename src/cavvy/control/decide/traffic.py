"""The autoscaler's view of a service, computed from the gateway's counts and the service's
replicas."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

import msgspec

from cavvy.autoscaler.decide import ScalingState, decide
from cavvy.autoscaler.objectives import GoalEstimate
from cavvy.autoscaler.terms import MarketObservation, ScalingTerms, ServiceObservation
from cavvy.control.decide.replica_markets import ANYWHERE, market_of
from cavvy.domain.request_bills import RequestWork
from cavvy.domain.service_loads import BatchFit, PlaceLoads, PromptSums, TokenTimes
from cavvy.domain.service_updates import RevisionTraffic
from cavvy.domain.services import (
    COMING_REPLICAS,
    DEFAULT_AVAILABILITY,
    ReplicaLoss,
    ReplicaRole,
    ReplicaState,
    ServiceReplica,
    ServiceSpec,
    ServingMarket,
    TargetKind,
)
from cavvy.domain.stored_services import StoredService
from cavvy.domain.values import Struct, combine, field, replace

_decode_state = msgspec.json.Decoder(ScalingState).decode
_READY = frozenset({ReplicaState.READY, ReplicaState.UNHEALTHY})
SCALED_EVERY = timedelta(seconds=1)  # the interval of the autoscaler's decisions
_IDLE_BEFORE_S = 60
# how long a program is assumed to take on a running machine until its first answer, until a cold
# start was measured
_FIRST_START_S = 10.0


class ServiceTraffic(Struct, frozen=True, kw_only=True):
    """The gateway's counts for a service. The counters from `arrivals` to `service_s` only grow
    while the gateway runs. `at_s` is the time by the gateway's own clock. `replicas` contains the
    number of requests in flight on each replica, and `keys_used` the time of each key's last use,
    in seconds since 1970. `tried` contains the counts of a canary's trial. `work` has one entry for
    each combination of gateway epoch, replica and client's key. The entry contains the number of
    requests and the replica time that these requests took. `process` identifies the gateway's
    process. When the gateway is restarted, the counts in `work` continue, and all other counters
    begin at 0. `places` counts the requests with a residency, by the places in which they must
    stay.
    """

    at_s: float
    arrivals: int = 0
    answered: int = 0
    started: int = 0
    late: int = 0
    lost: int = 0
    unserved: int = 0  # refused by a full queue, or because no replica was free in time
    shed: int = 0  # of these, those refused at once
    timed: int = 0  # answers whose latency the gateway has measured
    slow: int = 0  # of these, those that took longer than the service level permits
    latency: Mapping[int, int] = field(default_factory=dict)  # answers by `bucket_of` their latency
    service_s: float = 0.0
    batches: int = 0  # batches that contained several requests
    joined: int = 0  # requests that were part of such batches

    in_flight: int = 0
    in_flight_s: float = 0.0
    backlog: int = 0
    per_s: float = 0.0
    p50_s: float | None = None
    p95_s: float | None = None
    p99_s: float | None = None
    replicas: Mapping[str, int] = field(default_factory=dict)
    keys_used: Mapping[str, float] = field(default_factory=dict)
    tried: RevisionTraffic | None = None
    work: RequestWork = field(default_factory=dict)
    places: PlaceLoads = field(default_factory=dict)
    tokens: TokenTimes = TokenTimes()
    prompts: PromptSums = PromptSums()
    backlog_size: float = 0.0  # tokens in the prompts of those that wait
    fallbacks: Mapping[str, int] = field(default_factory=dict)  # answers by the fallback's ID
    batch: BatchFit | None = None  # the time of a batch, if the service has batches
    process: str = ""  # "" for the sum of several gateways
    whole: bool = True  # whether all gateways have reported their requests in flight


def make_terms(spec: ServiceSpec, role: ReplicaRole | None = None) -> ScalingTerms:
    """Return the autoscaler's terms, derived from the specification of the service, or of its
    replicas with this role.
    """
    target = spec.replicas.target
    waits = target.kind is TargetKind.QUEUE_WAIT
    return ScalingTerms(
        kind=target.kind,
        target=target.value,
        wait_s=target.value if waits else ScalingTerms().wait_s,
        concurrency=spec.concurrency,
        least=spec.replicas.least,
        most=spec.replicas.most,
        idle_s=spec.replicas.idle.total_seconds(),
        cold_start_s=_FIRST_START_S,
        availability=spec.slo.availability or DEFAULT_AVAILABILITY,
        ttft=spec.slo.ttft,
        token_gap=spec.slo.token_gap,
        role=role,
    )


def scale(
    service: StoredService,
    before: ServiceTraffic | None,
    traffic: ServiceTraffic,
    now: datetime,
    reading: float | None = None,
    role: ReplicaRole | None = None,
) -> StoredService:
    """Return the service with its wanted number of replicas (also for each of its markets), and
    with the autoscaler's next state. `before` is the traffic at the last decision, or None at the
    first decision after a start of the gateway or the server. `reading` is the mean, over the ready
    replicas, of the value by which the service is scaled. `role` is that of all its replicas.
    """
    state = _decode_state(service.scaling) if service.scaling else ScalingState()
    seen = replace(observe(service, before, traffic, now), reading=reading)
    if not service.scaling:
        # A rate that was measured over one second is not meaningful, because a new service was idle
        # before.
        seen = replace(seen, arrivals=(*[0] * _IDLE_BEFORE_S, *seen.arrivals))
    decision, state = decide(make_terms(service.spec, role), state, seen)
    scaling = msgspec.json.encode(state).decode()
    service = _mark_seen(service)
    counts = zip(service.markets, decision.placement, strict=False)
    return replace(
        service,
        target=decision.wanted,
        why=str(decision.reason),
        scaling=scaling,
        placement={market.name: count for market, count in counts if count},
    )


def read_goals(service: StoredService) -> GoalEstimate | None:
    """Return what the autoscaler expects of the service's objectives, or None if it has none, or if
    the speed of the language model is unknown.
    """
    return _decode_state(service.scaling).goals if service.scaling else None


def observe(
    service: StoredService, before: ServiceTraffic | None, traffic: ServiceTraffic, now: datetime
) -> ServiceObservation:
    """Return the autoscaler's input: the traffic since `before`."""
    before = find_former(before, traffic)
    arrived = traffic.arrivals - before.arrivals
    seconds = round(traffic.at_s - before.at_s)
    seconds = max(seconds, 1) if arrived else seconds
    return ServiceObservation(
        now_s=now.timestamp(),
        arrivals=_spread(arrived, seconds),
        started=traffic.started - before.started,
        late=traffic.late - before.late,
        completed=traffic.answered - before.answered,
        completed_s=traffic.service_s - before.service_s,
        in_flight=traffic.in_flight,
        in_flight_s=traffic.in_flight_s,
        backlog=traffic.backlog,
        batch=traffic.batch,
        tokens=combine(traffic.tokens, before.tokens, -1),
        prompts=combine(traffic.prompts, before.prompts, -1),
        backlog_size=traffic.backlog_size,
        markets=_observe_markets(service, now),
    )


def find_former(before: ServiceTraffic | None, traffic: ServiceTraffic) -> ServiceTraffic:
    """The counts in `traffic` grow; return what must be subtracted from them to get the counts
    since `before`. The result is `before`, or zeros if the gateway has been restarted since.
    """
    if (
        before is None
        or before.process != traffic.process
        or before.at_s > traffic.at_s
        or before.arrivals > traffic.arrivals
    ):
        return ServiceTraffic(at_s=traffic.at_s)
    return before


def _spread(count: int, seconds: int) -> tuple[int, ...]:
    """Return the arrivals of each second, assuming that requests arrived evenly."""
    return tuple(
        count * (second + 1) // seconds - count * second // seconds for second in range(seconds)
    )


def _observe_markets(service: StoredService, now: datetime) -> tuple[MarketObservation, ...]:
    """Return, for each market, an observation of the newest revision's replicas. Each cold start
    and each loss is reported only once.
    """
    ours = [each for each in service.replicas if each.revision == service.revision]
    if not service.markets:
        return (_observe_market(ServingMarket(name=ANYWHERE), ours, now),)
    return tuple(
        _observe_market(market, [each for each in ours if market_of(each) == market.name], now)
        for market in service.markets
    )


def _observe_market(
    market: ServingMarket, replicas: Sequence[ServiceReplica], now: datetime
) -> MarketObservation:
    starting = [each.ordered_at for each in replicas if each.state in COMING_REPLICAS]
    ready = [each for each in replicas if each.state in _READY]
    losses = [each.loss for each in replicas if not each.counted]
    return MarketObservation(
        name=market.name,
        region=market.region,
        spot=market.spot,
        rate=market.rate,
        boot_s=market.boot_s,
        starting_s=tuple(sorted(((now - at).total_seconds() for at in starting), reverse=True)),
        ready_s=tuple((now - (each.ready_at or now)).total_seconds() for each in ready),
        lost=losses.count(ReplicaLoss.LOST),
        refused=losses.count(ReplicaLoss.REFUSED),
        cold_starts_s=tuple(
            (each.ready_at - each.ordered_at).total_seconds()
            for each in ready
            if each.ready_at is not None and not each.measured
        ),
    )


def _mark_seen(service: StoredService) -> StoredService:
    """Return the service with a mark on each cold start and each loss of a replica that has
    happened until now. The mark means that the autoscaler has received this cold start or loss.
    """
    replicas = tuple(
        replace(each, measured=each.ready_at is not None, counted=each.loss is not None)
        for each in service.replicas
    )
    return replace(service, replicas=replicas)

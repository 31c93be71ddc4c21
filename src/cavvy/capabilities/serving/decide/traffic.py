"""The autoscaler's view of a service, computed from the gateway's counts and the service's
replicas. Adds up the counts of a service from the gateways of several servers."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta

import msgspec

from cavvy.capabilities.serving.autoscaler.aims import MissedAim, find_missed_aim
from cavvy.capabilities.serving.autoscaler.decide import ScalingState, decide
from cavvy.capabilities.serving.autoscaler.objectives import GoalEstimate
from cavvy.capabilities.serving.autoscaler.terms import (
    MarketObservation,
    ScalingTerms,
    ServiceObservation,
)
from cavvy.capabilities.serving.bills import RequestWork, merge_work
from cavvy.capabilities.serving.decide.replica_markets import ANYWHERE, market_of
from cavvy.capabilities.serving.loads import BatchFit, PlaceLoad, PlaceLoads, PromptSums, TokenTimes
from cavvy.capabilities.serving.replicas import (
    COMING_REPLICAS,
    ReplicaLoss,
    ReplicaState,
    RevisionTraffic,
    ServiceReplica,
    ServingMarket,
)
from cavvy.capabilities.serving.stored_services import StoredService
from cavvy.domain.service_updates import RevisionSums
from cavvy.domain.services import DEFAULT_AVAILABILITY, ReplicaRole, ServiceSpec, TargetKind
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


def read_missed_aim(service: StoredService, now: datetime) -> MissedAim | None:
    """Return why too few of the service's requests were on time in about the last hour, or None if
    enough were."""
    if not service.scaling or not service.wanted:
        return None
    state = _decode_state(service.scaling)
    return find_missed_aim(make_terms(service.spec), state, now.timestamp())


_LONGEST_S = 86_400  # the autoscaler remembers less than a day of single seconds


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
    """Return the arrivals of each second, assuming that requests arrived evenly. After a longer
    time than `_LONGEST_S`, they count as if they had arrived in this time."""
    seconds = min(seconds, _LONGEST_S)
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


_NOTHING = RevisionSums()


class GatewayCount(Struct, frozen=True, kw_only=True):
    """A service's counts at one gateway, and the version of the service that the gateway has
    received. `fresh` means that the server started this gateway; otherwise the server found the
    gateway already running.
    """

    version: int
    traffic: ServiceTraffic
    fresh: bool = False


class GatewayTotals(Struct, frozen=True, kw_only=True):
    """The traffic of all gateways so far, and the last report of each gateway, keyed by its server.
    The totals include gateways that do not answer now. The counters of `sum` only grow, even if
    gateways end or are restarted.
    """

    sum: ServiceTraffic | None = None
    last: Mapping[str, ServiceTraffic] = field(default_factory=dict)


def add_reports(
    totals: GatewayTotals, reports: Mapping[str, GatewayCount], at_s: float, *, whole: bool
) -> GatewayTotals:
    """Return the totals, updated with the newest reports. `at_s` is the time in seconds on the
    caller's clock. `whole` is true if every gateway has reported its requests in flight. If
    `totals` is empty, all reports count in full. If a gateway was already running when its server
    joined, the counts in the gateway's first report are not added, because these counts may cover a
    long time.

    Gateways report quantiles of the waits. The quantile over all gateways cannot be computed from
    these, so the result has the largest value that a gateway reported.
    """
    former = totals.sum or ServiceTraffic(at_s=at_s)
    counters = {name: getattr(former, name) for name in _COUNTERS}
    tried, tokens, prompts = former.tried, former.tokens, former.prompts
    fallbacks, latency = Counter(former.fallbacks), Counter(former.latency)
    for server, report in reports.items():
        new, old = report.traffic, _find_former(totals, server, report)
        for name in _COUNTERS:
            counters[name] += max(getattr(new, name) - getattr(old, name), 0)
        tokens = combine(tokens, combine(new.tokens, old.tokens, -1))
        prompts = combine(prompts, combine(new.prompts, old.prompts, -1))
        fallbacks += Counter(new.fallbacks) - Counter(old.fallbacks)
        latency += Counter(new.latency) - Counter(old.latency)
        tried = _add_tried(tried, new.tried, old.tried)
    told = [each.traffic for each in reports.values()]
    found = replace(
        _add_levels(told, at_s),
        **counters,
        tokens=tokens,
        prompts=prompts,
        fallbacks=dict(fallbacks),
        latency=dict(latency),
        tried=tried,
        whole=whole,
    )
    last = {**totals.last, **{name: each.traffic for name, each in reports.items()}}
    return GatewayTotals(last=last, sum=found)


def _find_former(totals: GatewayTotals, server: str, report: GatewayCount) -> ServiceTraffic:
    """Return the earlier counts that are subtracted from the report."""
    new, nothing = report.traffic, ServiceTraffic(at_s=report.traffic.at_s)
    old = totals.last.get(server)
    if old is None:
        return nothing if totals.sum is None or report.fresh else new
    other = new.process != old.process
    started_again = other or new.at_s < old.at_s or new.arrivals < old.arrivals
    return nothing if started_again else old


def _add_levels(told: Sequence[ServiceTraffic], at_s: float) -> ServiceTraffic:
    """Combine the values of all reports that describe the present, such as the number of requests
    in flight. The counters, such as the total number of requests, are left out.
    """
    return ServiceTraffic(
        at_s=at_s,
        in_flight=sum(each.in_flight for each in told),
        in_flight_s=sum(each.in_flight_s for each in told),
        backlog=sum(each.backlog for each in told),
        backlog_size=sum(each.backlog_size for each in told),
        per_s=sum(each.per_s for each in told),
        p50_s=_find_largest(each.p50_s for each in told),
        p95_s=_find_largest(each.p95_s for each in told),
        p99_s=_find_largest(each.p99_s for each in told),
        replicas=_join([each.replicas for each in told]),
        keys_used=_latest([each.keys_used for each in told]),
        work=merge_work(each.work for each in told),
        places=_add_places([each.places for each in told]),
        batch=_find_slowest(each.batch for each in told),
    )


def _find_slowest(fits: Iterable[BatchFit | None]) -> BatchFit | None:
    """Return the latency fit that predicts the longest time for a full batch. All gateways of a
    service use the same replicas.
    """
    known = (each for each in fits if each is not None)
    return max(known, key=lambda each: each.expect_s(each.most), default=None)


def _find_largest(values: Iterable[float | None]) -> float | None:
    return max((each for each in values if each is not None), default=None)


_COUNTERS = (
    *("arrivals", "answered", "started", "late", "lost", "unserved", "shed", "timed", "slow"),
    *("service_s", "batches", "joined"),
)


def _add_tried(
    total: RevisionTraffic | None, new: RevisionTraffic | None, old: RevisionTraffic | None
) -> RevisionTraffic | None:
    """Return the newest revision that is on trial at any gateway, with its traffic added up over
    all gateways.
    """
    if new is None or (total is not None and total.revision > new.revision):
        return total
    if total is None or total.revision < new.revision:
        total = RevisionTraffic(revision=new.revision, old=_NOTHING, new=_NOTHING)
    if old is None or old.revision != new.revision or old.new.requests > new.new.requests:
        old = RevisionTraffic(revision=new.revision, old=_NOTHING, new=_NOTHING)
    return replace(total, old=total.old + new.old - old.old, new=total.new + new.new - old.new)


def _add_places(parts: Sequence[PlaceLoads]) -> PlaceLoads:
    found: PlaceLoads = {}
    for part in parts:
        for name, load in part.items():
            other = found.get(name, PlaceLoad())
            found[name] = PlaceLoad(
                waiting=other.waiting + load.waiting,
                asked_at=max(other.asked_at, load.asked_at),
            )
    return found


def _join(parts: list[Mapping[str, int]]) -> Mapping[str, int]:
    found: dict[str, int] = {}
    for part in parts:
        for name, count in part.items():
            found[name] = found.get(name, 0) + count
    return found


def _latest(parts: list[Mapping[str, float]]) -> Mapping[str, float]:
    found: dict[str, float] = {}
    for part in parts:
        for name, at in part.items():
            found[name] = max(found.get(name, 0.0), at)
    return found

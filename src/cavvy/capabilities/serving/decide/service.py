"""Decides the next step of a service: which replicas to start, to send requests to, to drain and to
end."""

from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from datetime import datetime, timedelta
from typing import Any

from cavvy.capabilities.serving.decide.bound_requests import (
    OFFER_WAIT,
    BoundOrder,
    KeptReplicas,
    PlaceNeed,
    find_order,
    find_orders,
    find_places,
    keep_replicas,
    list_needs,
    list_possible,
    restrict_to_places,
    share_orders,
)
from cavvy.capabilities.serving.decide.replica_markets import (
    ANYWHERE,
    is_spot,
    list_missing,
    market_of,
    narrow,
    place_of,
)
from cavvy.capabilities.serving.loads import PlaceLoads
from cavvy.capabilities.serving.replicas import (
    COMING_REPLICAS,
    REPLICA_MOVES,
    SERVING,
    ReplicaLoss,
    ReplicaState,
    RevisionTraffic,
    ServiceReplica,
    ServingMarket,
    UnplacedRequests,
)
from cavvy.capabilities.serving.stored_services import KEPT_ENDED, StoredService
from cavvy.control.decide.budgets import ServiceStop
from cavvy.control.decide.task_places import place_in_regions
from cavvy.domain.jobs import JOB_ENDS, JobPhase
from cavvy.domain.offers import Offer
from cavvy.domain.services import HERE, SERVICE_TAG, ReplicaRole, TargetKind, UpdateStrategy
from cavvy.domain.tasks import RetryPolicy, TaskSpec
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import Struct, field, replace

# the pause after a replica that failed to start; doubles with each failure
_FIRST_PAUSE = timedelta(seconds=1)
_LONGEST_PAUSE = timedelta(minutes=1)
_STEADY = timedelta(minutes=1)  # a replica that was ready for so long has not failed to start
_SPOT_WAITS = timedelta(seconds=30)  # how long a replica waits for spot capacity
_SOON = timedelta(seconds=1)
_LATER = timedelta(seconds=10)
_PROGRAM_ENDED = "the program ended with exit code 0; the program of a service must keep running"


class ReplicaSeen(Struct, frozen=True, kw_only=True):
    """The observed state of a replica. `phase` is the phase of the replica's job, or None if there
    is no job. `tried` means that the job has had an attempt. `reclaimed` means that the replica's
    node will be reclaimed. `loss` says whether the spot market reclaimed the replica's node or had
    no capacity. `in_flight` is None while the gateway does not respond.
    """

    phase: JobPhase | None = None
    reason: str = ""
    waits: str = ""  # what delays the start of the job's gang
    offer: Offer | None = None
    rate: HourlyRate | None = None  # the current cost of the replica's nodes
    gang: str = ""
    address: str = ""  # of the node, for other nodes
    placed_at: datetime | None = None
    claimed_at: datetime | None = None
    tried: bool = False
    reclaimed: bool = False
    loss: ReplicaLoss | None = None
    answers: bool = False  # the last probe was answered
    held: bool = False  # it would answer, but waits for other replicas
    failures: int = 0  # probes in a row that failed
    problem: str = ""  # why the last probe failed
    in_flight: int | None = 0
    reading: float | None = None  # the value of the metric by which the service is scaled
    gpu_use: float | None = None  # the share of time in which its GPUs are busy


class ServiceSnapshot(Struct, frozen=True, kw_only=True):
    """The inputs of a decision about a service. `seen` contains the observed state of each replica
    that has not ended. `backlog` is the number of waiting requests, and `places` counts the
    requests that must stay in certain places. `tried` is the traffic of the candidate revision.
    """

    service: StoredService
    seen: Mapping[str, ReplicaSeen] = field(default_factory=dict)
    backlog: int = 0
    places: PlaceLoads = field(default_factory=dict)
    stop: ServiceStop = ServiceStop()
    tried: RevisionTraffic | None = None


class ServiceStep(Struct, frozen=True, kw_only=True):
    """The actions of one decision about a service: store the service, order new replicas, and start
    and stop the jobs of existing replicas. `orders` lists the market of each new replica; for "",
    the planner chooses the market. `grouped` lists the group of each new replica of a service with
    groups. `candidates` and `candidate_groups` are the number of new replicas of the candidate
    revision, and their groups. `members` are the workers of new routers, by revision, if routers
    start with a list of workers. `bound` are additional replicas to order, for requests that must
    stay in certain places. `finished` means that the service was ended and has no replicas left.
    The next decision is due after the time `after`.
    """

    service: StoredService
    orders: tuple[str, ...] = ()
    grouped: tuple[str, ...] = ()
    candidates: int = 0
    candidate_groups: tuple[str, ...] = ()
    members: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    bound: tuple[BoundOrder, ...] = ()
    start: tuple[ServiceReplica, ...] = ()
    stop: tuple[ServiceReplica, ...] = ()
    finished: bool = False
    after: timedelta = _LATER


def decide_service(view: ServiceSnapshot, now: datetime) -> ServiceStep:
    """Return the next step of a service."""
    service = view.service
    replicas = _follow_all(view, now)
    service = replace(_count_failures(service, replicas, now), stopped_by=view.stop.hard)
    need = _find_need(view, service, replicas, now)
    replicas = _limit(service, replicas, need, now)
    pause = _find_pause(service, now)
    known = (*service.replicas, *replicas)
    ended = [each for each in known if each.state is ReplicaState.ENDED]
    orders = _find_orders(service, replicas, ended, need, now)
    service = replace(service, unplaced=orders.full)
    if pause is not None or view.stop.any:
        orders = _Orders()
    living = [each for each in replicas if each.state is not ReplicaState.ENDED]
    soon = orders.markets or orders.bound or view.backlog or living
    return ServiceStep(
        service=replace(service, replicas=(*ended[-KEPT_ENDED:], *living)),
        orders=orders.markets,
        bound=orders.bound,
        start=tuple(each for each in living if each.state is ReplicaState.ORDERED),
        stop=tuple(each for each in living if each.state is ReplicaState.ENDING),
        finished=not service.wanted and not living,
        after=min(_SOON if soon else _LATER, pause or _LATER),
    )


def state_of(service: StoredService) -> str:
    """Return "ending", "ready", "failing", "starting" or "idle"; an idle service has no replica and
    needs no replica."""
    if not service.wanted:
        return "ending"
    if any(each.state in SERVING for each in service.replicas if each.role is None):
        return "ready"
    if any(each.role is not None for each in list_serving(service)):
        return "ready"
    if service.failures:
        return "failing"
    return "starting" if service.open else "idle"


def list_serving(service: StoredService) -> tuple[ServiceReplica, ...]:
    """Return the replicas that get requests. The replicas of a candidate revision are included only
    if the revision is a canary.
    """
    hidden = 0 if is_canary(service) else service.tried
    return tuple(
        each
        for each in service.replicas
        if each.state in SERVING and each.revision != hidden and _gets_requests(each, service)
    )


def _gets_requests(replica: ServiceReplica, service: StoredService) -> bool:
    """Return whether the gateway sends requests to a ready replica. A router gets them while its
    workers are ready; a worker gets them only if its revision has no router.
    """
    if replica.role is None:
        return True
    ours = [each for each in service.open if each.revision == replica.revision]
    if replica.role is ReplicaRole.WORKER:
        return not any(each.role is ReplicaRole.ROUTER for each in ours)
    known = [each for each in ours if not replica.members or each.id in replica.members]
    ready = {each.role for each in known if each.state in SERVING}
    return replica.role is ReplicaRole.ROUTER and not find_absent(ready)


def find_absent(roles: AbstractSet[ReplicaRole | None]) -> str:
    """Return a role that is missing in `roles`, so that they cannot answer requests, or ""."""
    if ReplicaRole.WORKER in roles:
        return ""
    parts = (ReplicaRole.PREFILL, ReplicaRole.DECODE)
    if not roles & {*parts}:
        return ReplicaRole.WORKER
    return next((each for each in parts if each not in roles), "")


def average_readings(service: StoredService, seen: Mapping[str, ReplicaSeen]) -> float | None:
    """Return the mean value of the autoscaling metric over the replicas that get requests, or None
    if no replica has reported the metric.
    """
    found_in = list_serving(service)
    if any(each.role is not None for each in service.replicas):  # of one group
        found_in = tuple(each for each in service.replicas if each.state in SERVING)
    ready = [seen[each.id] for each in found_in if each.id in seen]
    by_gpu = service.spec.replicas.target.kind is TargetKind.GPU_UTILISATION
    found = [each.gpu_use if by_gpu else each.reading for each in ready]
    known = [each for each in found if each is not None]
    return sum(known) / len(known) if known else None


def is_canary(service: StoredService) -> bool:
    """Return whether a candidate revision gets some of the requests."""
    tried = service.candidate
    spec = None if tried is None else tried.task.service
    return spec is not None and spec.update.strategy is UpdateStrategy.CANARY


def order_replica(
    service: StoredService,
    replica_id: str,
    port: int,
    now: datetime,
    market: str = ANYWHERE,
    revision: int = 0,
) -> StoredService:
    """Return the service with one more replica, of the given revision or, by default, of the newest
    revision. The replica's row is stored before its job is submitted under the replica's ID, so
    that a restart between the two steps neither loses nor repeats the replica.
    """
    replica = ServiceReplica(
        id=replica_id,
        number=service.ordered + 1,
        service=service.name,
        revision=revision or service.revision,
        market=market,
        port=port,
        ordered_at=now,
    )
    return replace(service, replicas=(*service.replicas, replica), ordered=replica.number)


def change_last(service: StoredService, **changes: Any) -> StoredService:
    """Return the service with these fields changed in the replica that was ordered last."""
    *others, last = service.replicas
    return replace(service, replicas=(*others, replace(last, **changes)))


def make_replica_task(
    task: TaskSpec,
    name: str,
    port: int,
    market: ServingMarket | None = None,
    bound_to: tuple[str, ...] = (),
) -> TaskSpec:
    """Return the task of a replica's job. The job may run only in `market`, if one is given, and
    only in places that each entry of `bound_to` permits. The job is not retried: the service orders
    another replica instead.
    """
    task = place_in_regions(task)
    task = restrict_to_places(task, frozenset(bound_to)) or task
    return replace(
        task if market is None else narrow(task, market),
        name=name,
        env={**task.env, "PORT": str(port)},
        tags={**task.tags, SERVICE_TAG: task.name},
        retry=RetryPolicy(preemption=0, node=0, exit=0),
    )


# One replica


def _follow_all(view: ServiceSnapshot, now: datetime) -> list[ServiceReplica]:
    """Return the stored replicas that have not ended, updated to their observed states."""
    service, seen = view.service, view.seen
    return [_follow(service, each, seen.get(each.id, ReplicaSeen()), now) for each in service.open]


def _follow(
    service: StoredService, replica: ServiceReplica, seen: ReplicaSeen, now: datetime
) -> ServiceReplica:
    """Return the replica, updated to its observed state."""
    if seen.rate is not None and seen.rate != replica.rate:
        replica = replace(replica, rate=seen.rate)
    if seen.phase in JOB_ENDS or (seen.phase is None and replica.state is not ReplicaState.ORDERED):
        replica = replace(replica, loss=replica.loss or seen.loss)
        reason = _PROGRAM_ENDED if seen.phase is JobPhase.DONE else seen.reason
        return _end(replica, reason or "the replica's job was removed", now)
    match replica.state:
        case ReplicaState.ORDERED if seen.phase is not None:
            return _follow(service, move(replica, ReplicaState.STARTING, "", now), seen, now)
        case ReplicaState.STARTING:
            return _follow_start(service, replica, seen, now)
        case ReplicaState.READY:
            return _follow_ready(service, replica, seen, now)
        case ReplicaState.UNHEALTHY if seen.answers:
            return move(replica, ReplicaState.READY, "", now)
        case ReplicaState.UNHEALTHY if seen.failures >= 2 * service.spec.probe.failures:
            reason = _say("the replica did not recover", seen.problem)
            return move(replica, ReplicaState.ENDING, reason, now)
        case ReplicaState.DRAINING if _is_drained(service, replica, seen, now):
            return move(replica, ReplicaState.ENDING, replica.reason, now)
    return replica


def _follow_start(
    service: StoredService, replica: ServiceReplica, seen: ReplicaSeen, now: datetime
) -> ServiceReplica:
    waits = seen.phase is JobPhase.QUEUED and replica.role is None
    if waits and replica.bound_to:
        if now - replica.ordered_at >= OFFER_WAIT:
            replica = replace(replica, loss=ReplicaLoss.REFUSED)
            where = " and ".join(replica.bound_to)
            return move(replica, ReplicaState.ENDING, f"no offer in {where}: {seen.reason}", now)
    elif waits and is_spot(replica):
        waited = now - replica.ordered_at >= _SPOT_WAITS
        if seen.tried or waited:
            replica = replace(replica, loss=ReplicaLoss.REFUSED)
            return move(replica, ReplicaState.ENDING, f"no spot capacity: {seen.reason}", now)
    if seen.phase is not JobPhase.RUNNING:
        queued = seen.phase is JobPhase.QUEUED
        offer = None if queued else seen.offer
        return replace(
            replica,
            reason=seen.reason if queued else seen.waits,
            places=() if offer is None else find_places(offer),
            account="" if offer is None else offer.account,
        )
    if replica.running_at is None:
        replica = _locate(replace(replica, running_at=now), seen)
    if seen.answers:
        return move(replica, ReplicaState.READY, "", now)
    start = service.spec.probe.start
    if not seen.held and now - (replica.running_at or now) >= start:
        reason = _say(f"no probe succeeded within {start.total_seconds():g} s", seen.problem)
        return move(replica, ReplicaState.ENDING, reason, now)
    return replace(replica, reason=seen.problem)


def _follow_ready(
    service: StoredService, replica: ServiceReplica, seen: ReplicaSeen, now: datetime
) -> ServiceReplica:
    if seen.phase is not JobPhase.RUNNING:
        return move(replica, ReplicaState.ENDING, "the replica's job is stopping", now)
    if seen.reclaimed:
        replica = replace(replica, reclaimed=True, loss=ReplicaLoss.LOST)
        return move(replica, ReplicaState.DRAINING, "the replica's node will be reclaimed", now)
    if seen.failures >= service.spec.probe.failures:
        reason = _say("the replica does not answer its probe", seen.problem)
        return move(replica, ReplicaState.UNHEALTHY, reason, now)
    return replica


def _say(what: str, why: str) -> str:
    return f"{what}: {why}" if why else what


def _locate(replica: ServiceReplica, seen: ReplicaSeen) -> ServiceReplica:
    """Return the replica with its location, account and gang taken from `seen`."""
    if seen.offer is None:
        return replica
    gang = "" if seen.offer.provider == HERE else seen.gang
    return replace(
        replica,
        gang=gang,
        address="127.0.0.1" if seen.offer.provider == HERE else seen.address,
        place=place_of(seen.offer),
        places=find_places(seen.offer),
        account=seen.offer.account,
        placed_at=seen.placed_at,
        claimed_at=seen.claimed_at,
    )


def _is_drained(
    service: StoredService, replica: ServiceReplica, seen: ReplicaSeen, now: datetime
) -> bool:
    since = replica.draining_at or now
    return now - since >= service.spec.drain or (seen.in_flight == 0 and now > since)


def move(
    replica: ServiceReplica, state: ReplicaState, reason: str, now: datetime
) -> ServiceReplica:
    """Return the replica after it has entered another state. Raise ValueError if the replica may
    not enter this state.
    """
    if state not in REPLICA_MOVES[replica.state]:
        raise ValueError(f"a replica that is {replica.state} cannot become {state}")
    moved = replace(replica, state=state, reason=reason)
    if state is ReplicaState.READY and replica.ready_at is None:
        return replace(moved, ready_at=now)
    if state is ReplicaState.DRAINING:
        return replace(moved, draining_at=now)
    return replace(moved, ended_at=now) if state is ReplicaState.ENDED else moved


def _end(replica: ServiceReplica, reason: str, now: datetime) -> ServiceReplica:
    if replica.state is not ReplicaState.ENDING:
        replica = move(replica, ReplicaState.ENDING, reason, now)
    return move(replica, ReplicaState.ENDED, replica.reason, now)


# All replicas


def _count_failures(
    service: StoredService, replicas: list[ServiceReplica], now: datetime
) -> StoredService:
    """Update the service's count of consecutive failures. Each replica of the newest revision that
    has failed since the last decision adds one. A replica of this revision that has worked sets the
    count to 0: it has been ready for a while, or was ready until it was no longer needed.
    """
    before = {each.id: each for each in service.open}
    for replica in replicas:
        was = before[replica.id]
        if was.revision != service.revision:
            continue
        steady = replica.ready_at is not None and (
            now - replica.ready_at >= _STEADY or was.state is ReplicaState.DRAINING
        )
        gone = replica.state in (ReplicaState.ENDING, ReplicaState.ENDED)
        left = was.state in (*COMING_REPLICAS, ReplicaState.READY, ReplicaState.UNHEALTHY)
        if steady and (service.failures or not service.steady):
            service = replace(
                service, failures=0, failed_at=None, problem="", steady=True, worked=None
            )
        elif gone and left and not steady and replica.loss is None:
            service = replace(
                service, failures=service.failures + 1, failed_at=now, problem=replica.reason
            )
    return service


def _find_pause(service: StoredService, now: datetime) -> timedelta | None:
    """Return how long to wait before ordering a new replica after the last replicas failed to
    start."""
    if not service.failures or service.failed_at is None:
        return None
    pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(service.failures - 1, 10))
    left = service.failed_at + pause - now
    return left if left > timedelta(0) else None


def count_wanted(service: StoredService, backlog: int) -> int:
    """Return the wanted number of replicas, which is at least one if requests wait."""
    if not service.wanted or service.stopped_by:
        return 0
    bounds = service.spec.replicas
    return min(bounds.most, max(bounds.least, service.target, 1 if backlog else 0))


def _counts(replica: ServiceReplica, revision: int) -> bool:
    """Return whether the replica serves the newest revision, or will serve it."""
    going = (ReplicaState.DRAINING, ReplicaState.ENDING, ReplicaState.ENDED)
    return replica.revision == revision and replica.state not in going


class _ReplicaNeed(Struct, frozen=True, kw_only=True):
    """The wanted number of replicas, the places that need a replica, the replicas kept for these
    places, and the number of waiting requests.
    """

    wanted: int
    places: Sequence[PlaceNeed]
    kept: KeptReplicas
    backlog: int


class _Orders(Struct, frozen=True, kw_only=True):
    """The replicas to order. `markets` has the market of each replica that may run in any place,
    and `bound` has the replicas that must run in certain places. `full` has the requests that need
    one more replica than the service's maximum.
    """

    markets: tuple[str, ...] = ()
    bound: tuple[BoundOrder, ...] = ()
    full: tuple[UnplacedRequests, ...] = ()


def _find_need(
    view: ServiceSnapshot, service: StoredService, replicas: list[ServiceReplica], now: datetime
) -> _ReplicaNeed:
    bounds = service.spec.replicas
    wanted = count_wanted(service, view.backlog)
    places = list_needs(view.places, bounds.idle, now) if wanted else ()
    open_ones = [each for each in _list_newest(service, replicas) if _is_open(each)]
    kept = keep_replicas(places, open_ones)
    wanted = min(bounds.most, max(wanted, len(kept.ids)))
    return _ReplicaNeed(wanted=wanted, places=places, kept=kept, backlog=view.backlog)


def _list_newest(
    service: StoredService,
    replicas: list[ServiceReplica],
    kept: frozenset[str] = frozenset(),
) -> list[ServiceReplica]:
    """Return the replicas of the newest revision; the replica that should end first comes last."""
    ours = [each for each in replicas if each.revision == service.revision]
    return sorted(ours, key=lambda each: (each.id not in kept, *_age_of(each)))


def _find_orders(
    service: StoredService,
    replicas: list[ServiceReplica],
    ended: list[ServiceReplica],
    need: _ReplicaNeed,
    now: datetime,
) -> _Orders:
    """Return the replicas to order: one for each missing place, and additional replicas that the
    load needs. Additional replicas are ordered in the places where requests wait.
    """
    going = [*ended, *(each for each in replicas if each.state is ReplicaState.ENDING)]
    counting = [
        each
        for each in _list_newest(service, replicas, need.kept.ids)
        if _counts(each, service.revision)
    ]
    first = find_orders(service, list_possible(service, need.kept.missing, going, now), counting)
    if need.wanted and service.placement:
        markets = list_missing(service.placement, counting, going, now)
        return _Orders(markets=markets, bound=first.orders, full=first.full)
    count = max(0, need.wanted - len(counting) - len(first.orders))
    coming = [each.bound_to for each in counting if each.state in COMING_REPLICAS]
    coming += [each.places for each in first.orders]
    possible = list_possible(service, need.places, going, now)
    shared = share_orders(count, possible, map(frozenset, coming), need.backlog)
    more = [order for each in shared if each and (order := find_order(service, each)) is not None]
    return _Orders(
        markets=(ANYWHERE,) * (count - len(more)),
        bound=(*first.orders, *more),
        full=first.full,
    )


def _limit(
    service: StoredService,
    replicas: list[ServiceReplica],
    need: _ReplicaNeed,
    now: datetime,
) -> list[ServiceReplica]:
    """Return the replicas, with surplus replicas changed to draining or ending. Replicas of older
    revisions serve until enough replicas of the newest revision are ready. If a market has too many
    replicas, its surplus replicas serve until the service has more ready replicas than it needs.
    Replicas that are kept for requests bound to places are the last to end.
    """
    wanted, needed = need.wanted, need.kept.ids
    revision, placement = service.revision, service.placement if wanted else {}
    ready = sum(each.state is ReplicaState.READY and each.revision == revision for each in replicas)
    older, spare = max(0, wanted - ready), max(0, ready - wanted)
    newest = _add_needed(placement, replicas, needed) if placement else {ANYWHERE: wanted}
    kept = {}
    # the oldest serving replicas are kept first
    for replica in sorted(replicas, key=lambda each: (each.id not in needed, *_age_of(each))):
        is_newest = replica.revision == revision
        market = market_of(replica) if placement else ANYWHERE
        left = newest.get(market, 0) if is_newest else older
        fitted = _fit(replica, is_newest, left, spare, now)
        if is_newest and replica.state is ReplicaState.READY and fitted is not replica:
            spare -= 1
        if _is_open(replica) and is_newest:
            newest[market] = left - 1
        elif _is_open(replica):
            older -= 1
        kept[replica.id] = fitted
    return [kept[each.id] for each in replicas]


def _add_needed(
    placement: Mapping[str, int], replicas: list[ServiceReplica], needed: frozenset[str]
) -> dict[str, int]:
    """Return the wanted number of replicas in each market. The number is at least the number of
    replicas that must be kept in the market.
    """
    held = Counter(market_of(each) for each in replicas if each.id in needed)
    return {name: max(placement.get(name, 0), held[name]) for name in (*placement, *held)}


def _fit(
    replica: ServiceReplica, is_newest: bool, left: int, spare: int, now: datetime
) -> ServiceReplica:
    """Return the replica, changed to draining or ending if it is surplus. If the replica belongs to
    the newest revision, `left` is the number of replicas still needed in the replica's market;
    otherwise, `left` is the number of replicas of older revisions that are still needed. `spare` is
    the number of ready replicas beyond the service's need.
    """
    if not _is_open(replica):
        return replica
    if left > 0 and is_newest:
        again = replica.state is ReplicaState.DRAINING
        return move(replica, ReplicaState.READY, "", now) if again else replica
    if left > 0 and replica.state not in COMING_REPLICAS:
        return replica
    needed = is_newest and replica.state is ReplicaState.READY and not spare
    return replica if needed else dismiss(replica, now)


def _is_open(replica: ServiceReplica) -> bool:
    """Return whether the replica serves, will serve, or could serve again."""
    going = (ReplicaState.ENDING, ReplicaState.ENDED)
    return replica.state not in going and not replica.reclaimed


_RANKS = (
    ReplicaState.READY,
    ReplicaState.DRAINING,
    ReplicaState.UNHEALTHY,
    ReplicaState.STARTING,
    ReplicaState.ORDERED,
    ReplicaState.ENDING,
    ReplicaState.ENDED,
)


def _age_of(replica: ServiceReplica) -> tuple[int, datetime, str]:
    """Return the sort key that decides which replicas to keep: first by state, with serving
    replicas first, and then by age.
    """
    return _RANKS.index(replica.state), replica.ordered_at, replica.id


def dismiss(
    replica: ServiceReplica, now: datetime, reason: str = "the replica is no longer needed"
) -> ServiceReplica:
    """Return the unneeded replica in its next state: draining until its requests are finished, or
    ending if it has no requests."""
    if replica.state is ReplicaState.READY:
        return move(replica, ReplicaState.DRAINING, reason, now)
    if replica.state is ReplicaState.DRAINING:
        return replica
    return move(replica, ReplicaState.ENDING, reason, now)

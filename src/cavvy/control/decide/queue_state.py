"""Describes the queue and the capacity as `scheduler.start_estimates` needs them."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from math import inf

from cavvy.control.decide.placement import MarketSnapshot, is_steered
from cavvy.control.decide.start_trials import make_row, share_held
from cavvy.domain.allocations import Allocation, Host
from cavvy.domain.jobs import Attempt, AttemptPhase, JobRecord
from cavvy.domain.offers import Offer
from cavvy.domain.services import SERVICE_TAG
from cavvy.domain.shares import GangShare, QueueRow
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.values import Struct
from cavvy.scheduler.offer_lines import count_left, place_of, pool_of, units_of
from cavvy.scheduler.packing import AllocationOwner, HostIndex, allocate_one
from cavvy.scheduler.shares import ShareLimits
from cavvy.scheduler.start_estimates import (
    Amounts,
    GangKind,
    HeldPart,
    LaneDemand,
    LinedUpJob,
    PlannedGang,
    QueueState,
    RunningGang,
    find_kind,
)

_ENDING_S = 5.0  # until the nodes of a gang that ends are free
_Suited = Sequence[tuple[TaskSpec, Sequence[Offer]]]
_NOBODY = AllocationOwner(gang="", project="")


class GangRow(Struct, frozen=True, kw_only=True):
    """An attempt that has not ended, and its job."""

    attempt: Attempt
    job: JobRecord


class WaitingRow(Struct, frozen=True, kw_only=True):
    """A waiting job, and the offers that suit it, for each alternative of its task. Jobs that need
    the same have the same object as `suited`."""

    row: QueueRow
    job: JobRecord
    suited: _Suited


class _Wish(Struct, frozen=True):
    """What a job needs: the amounts on each of `nodes` of the hosts or pools in `places`. If the
    provider must start nodes, `boots` is set."""

    places: tuple[str, ...]
    nodes: int
    amounts: Amounts
    provider: str
    boots: bool


def make_queue_state(
    waiting: Sequence[WaitingRow],
    gangs: Sequence[GangRow],
    snapshot: MarketSnapshot,
    allocations: Sequence[Allocation],
    limits: ShareLimits,
    boots_s: Mapping[str, Sequence[float]],
    now: datetime,
) -> QueueState:
    """Return the queue in this order, the gangs that hold nodes, and what is free. `boots_s` are
    times that nodes of each provider needed until the work ran.

    No start can be estimated for jobs that the deadline policy places, and for jobs whose provider
    starts nodes but has started none before. Such jobs need nothing in the result. A job uses no
    place where it has failed before the place's cooldown ends.
    """
    index = HostIndex(host for host in snapshot.market.hosts if host.ready)
    known: dict[tuple[int, frozenset[str]], Sequence[_Wish]] = {}

    def find_wishes(suited: _Suited, avoid: frozenset[str]) -> Sequence[_Wish]:
        key = id(suited), avoid
        if key not in known:
            found = _list_wishes(suited, index, avoid)
            known[key] = [wish for wish in found if not wish.boots or boots_s.get(wish.provider)]
        return known[key]

    wishes = [_find_wished(each, find_wishes, now) for each in waiting]
    lanes = _Lanes(known.values(), snapshot, index.by_name, allocations)
    bounds = [tuple(limits.list_bounds(each.row, _find_cost(each))) for each in waiting]
    left = {key: free for found in bounds for key, _, free in found}
    by_gang: defaultdict[str, list[Allocation]] = defaultdict(list)
    for allocation in allocations:
        by_gang[allocation.gang].append(allocation)
    return QueueState(
        lanes=lanes.free,
        running=[
            _make_gang(each, lanes.list_parts(each.attempt, by_gang), limits, left, now)
            for each in gangs
        ],
        line=[
            LinedUpJob(
                id=each.row.id,
                planned=PlannedGang(kind=find_kind_of(each.job), most_s=_find_most(each.job)),
                demands=lanes.list_demands(wished),
                limits={key: amount for key, amount, _ in bound},
                boots_s=boots_s.get(wished[0].provider, ()) if wished else (),
                rests_s=rests_s,
            )
            for each, (wished, rests_s), bound in zip(waiting, wishes, bounds, strict=True)
        ],
        limits=left,
    )


def _find_wished(
    waiting: WaitingRow,
    find_wishes: Callable[[_Suited, frozenset[str]], Sequence[_Wish]],
    now: datetime,
) -> tuple[Sequence[_Wish], float]:
    """Return what the job may start on and, for a job that avoids all its places, the seconds until
    it may use the first of them.
    """
    job = waiting.job
    if is_steered(job):
        return (), 0.0
    avoid = {place: until for place, until in job.avoid.items() if until > now}
    wished = find_wishes(waiting.suited, frozenset(avoid))
    if wished or not avoid:
        return wished, 0.0
    rests = min(avoid.values()) - now
    return find_wishes(waiting.suited, frozenset()), rests / timedelta(seconds=1)


def find_kind_of(job: JobRecord) -> GangKind:
    """Return the kind of the job's gangs."""
    return find_kind(job.project, job.user, job.name)


def _list_wishes(suited: _Suited, index: HostIndex, avoid: frozenset[str]) -> Sequence[_Wish]:
    places: defaultdict[tuple[int, Amounts, str, bool], dict[str, None]] = defaultdict(dict)
    for task, offers in suited:
        for offer in offers if not avoid else [each for each in offers if each.key not in avoid]:
            if not offer.shared:
                amounts = (float(task.nodes * units_of(offer)), 0.0, 0.0)
                places[1, amounts, offer.provider, True][pool_of(offer)] = None
                continue
            apart = place_of(offer) not in index.by_name and task.nodes > 1
            for host in index.find(offer):
                if host.name in avoid:
                    continue
                found = allocate_one(task, offer, host, (), _NOBODY, 0)
                if found is not None:
                    nodes, times = (task.nodes, 1) if apart else (1, task.nodes)
                    places[nodes, _amounts_of(found, times), offer.provider, False][host.name] = (
                        None
                    )
    return [
        _Wish(tuple(names), nodes, amounts, provider, boots)
        for (nodes, amounts, provider, boots), names in places.items()
    ]


def _amounts_of(allocation: Allocation, times: int = 1) -> Amounts:
    one = (len(allocation.devices), allocation.cpus, allocation.memory_mib)
    return tuple(float(each * times) for each in one)


class _Lanes:
    """Divides hosts and pools into lanes: those of a lane suit the same jobs."""

    def __init__(
        self,
        wishes: Iterable[Sequence[_Wish]],
        snapshot: MarketSnapshot,
        hosts: Mapping[str, Host],
        allocations: Sequence[Allocation],
    ) -> None:
        users: defaultdict[str, list[int]] = defaultdict(list)
        for number, places in enumerate({wish.places: None for some in wishes for wish in some}):
            for place in places:
                users[place].append(number)
        free = _find_free(snapshot, hosts, allocations)
        numbers: dict[tuple[int, ...], int] = {}
        self.free: list[list[Amounts]] = []
        self._places: dict[str, tuple[int, int]] = {}  # the lane of each place, and the host in it
        for place, users_of in users.items():
            lane = numbers.setdefault(tuple(users_of), len(numbers))
            if lane == len(self.free):
                self.free.append([])
            self._places[place] = lane, len(self.free[lane])
            self.free[lane].append(free.get(place, (inf, 0.0, 0.0)))

    def list_demands(self, wishes: Sequence[_Wish]) -> Sequence[LaneDemand]:
        """Return what a job with these wishes needs."""
        found = {
            LaneDemand(lane, wish.nodes, wish.amounts): None
            for wish in wishes
            for lane in {self._places[place][0] for place in wish.places}
        }
        return tuple(found)

    def list_parts(
        self, attempt: Attempt, by_gang: Mapping[str, Sequence[Allocation]]
    ) -> Sequence[HeldPart]:
        """Return what the attempt's gang holds of the places for which jobs wait."""
        held = [(each.host, _amounts_of(each)) for each in by_gang.get(attempt.gang, ())]
        if not attempt.offer.shared:
            units = float(attempt.nodes * units_of(attempt.offer))
            held = [(pool_of(attempt.offer), (units, 0.0, 0.0))]
        return [
            HeldPart(*self._places[place], amounts)
            for place, amounts in held
            if place in self._places
        ]


def _find_free(
    snapshot: MarketSnapshot, hosts: Mapping[str, Host], allocations: Sequence[Allocation]
) -> Mapping[str, Amounts]:
    """Return what is free of each host, and of each pool whose capacity is known."""
    free: dict[str, Amounts] = {
        name: (float(len(host.devices)), float(host.cpus), float(host.memory_mib))
        for name, host in hosts.items()
    }
    for each in allocations:
        if each.host in free:
            free[each.host] = tuple(map(float.__sub__, free[each.host], _amounts_of(each)))
    for offer in snapshot.market.offers:
        left = None if offer.shared else count_left(offer, snapshot.used)
        if left is not None:
            pool, units = pool_of(offer), float(left * units_of(offer))
            free[pool] = (max(units, free.get(pool, (0.0,))[0]), 0.0, 0.0)
    return free


def _make_gang(
    row: GangRow,
    parts: Sequence[HeldPart],
    limits: ShareLimits,
    left: Mapping[str, float],
    now: datetime,
) -> RunningGang:
    attempt, job = row.attempt, row.job
    left_s = None
    if attempt.phase is AttemptPhase.ENDING:
        left_s = _ENDING_S
    elif attempt.phase is AttemptPhase.KEPT and attempt.kept_until is not None:
        left_s = max(0.0, (attempt.kept_until - now) / timedelta(seconds=1))
    elif SERVICE_TAG in job.task.tags:
        left_s = inf  # replicas do not end by themselves
    kept = attempt.phase is AttemptPhase.KEPT
    bounds = () if kept else limits.list_bounds(make_row(job), share_held(attempt, job))
    return RunningGang(
        planned=PlannedGang(
            kind=find_kind_of(job),
            age_s=max(0.0, (now - attempt.created_at) / timedelta(seconds=1)),
            most_s=_find_most(job),
        ),
        parts=parts,
        limits={key: amount for key, amount, _ in bounds if key in left},
        left_s=left_s,
    )


def _find_cost(waiting: WaitingRow) -> GangShare:
    """Return what the job costs an hour on its cheapest offer, which is the first."""
    task, offers = waiting.suited[0] if waiting.suited else (waiting.job.task, ())
    rate = offers[0].rate.micros_per_hour if offers else 0
    return GangShare(micros_per_hour=rate * task.nodes)


def _find_most(job: JobRecord) -> float:
    duration = job.task.limits.duration
    return inf if duration is None else duration / timedelta(seconds=1)

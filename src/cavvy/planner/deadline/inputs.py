"""Computes the inputs of the deadline policy for one job (its markets and terms) from the task and
the offers that the job may use.

A market is one machine type in one location, with a spot offer, an on-demand offer or both. Work is
measured in seconds on a reference machine. If a machine is faster than the reference machine, the
policy assumes the speed of the reference machine, and a price that is lower in proportion.
Therefore estimated times are never too short. Machines that are slower than the reference machine
are left out.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from math import inf

from cavvy.catalog.residency import find_cloud
from cavvy.domain.jobs import Attempt
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.tasks import SpotPolicy, TaskSpec
from cavvy.domain.units import Money
from cavvy.domain.values import Struct, field
from cavvy.planner.deadline.policy import PolicyMargins
from cavvy.planner.markets import MarketKnowledge
from cavvy.planner.risk import SPOT_PREEMPTIONS_PER_HOUR, chosen_interval
from cavvy.planner.spot.view import ABOUT, NOWHERE, JobTerms, PolicyMarket
from cavvy.planner.work import estimate

MOST_MARKETS = 8  # maximum number of spot markets that a policy compares
# machines that are slower than the reference by at most this factor are treated as equally fast
_ALIKE = 1.02
_SETUP_PRIOR = timedelta(seconds=60)  # assumed setup time of a task whose setup has not run yet
# Measured work counts against an estimate that has the weight of this much work. A job that began
# with another job's checkpoint seems fast, so little is deducted from an estimate.
_PACE_PRIOR = timedelta(minutes=5)
_FASTEST_PACE, _SLOWEST_PACE = 0.67, 8.0
_MIB, _GB = 1 << 20, 10**9
# the provider that each URL scheme of a bucket belongs to
_BUCKETS = {"s3": "aws", "gs": "gcp", "az": "azure"}


class JobProgress(Struct, frozen=True, kw_only=True):
    """The progress of a job, and its current gang."""

    submitted_at: datetime
    deadline: datetime
    # share of the work that is done, including work of the current gang that is not saved yet
    done: float = 0.0
    current: Offer | None = None  # the offer of the current gang, which may be running or starting
    works: bool = False  # whether the current gang has started to work
    starting_for: timedelta = timedelta(0)  # for how long the current gang has been starting
    # unsaved work of the current gang since its newest checkpoint
    unsaved: timedelta = timedelta(0)
    at_risk: bool = False  # whether the provider reported that it may soon preempt the current gang
    home: Offer | None = None  # the offer on which the job ran last
    setup: timedelta | None = None  # the measured setup time, or None if setup has not run yet
    budget_left: Money | None = None
    # the size of the checkpoint, which must be copied if the job moves to another market
    saved_bytes: int = 0
    # The time that the work done so far took, as a multiple of its estimate. The rest of the work
    # is expected to take the same multiple, on all machines.
    pace: float = 1.0
    # The egress price per GB; the keys are "provider/region" or the provider
    egress: Mapping[str, Money] = field(default_factory=dict)


class SteeredMarket(Struct, frozen=True):
    """One market with its offers. `run_time_ratio` is the work's running time on this market's
    machine divided by its running time on the reference machine. `run_time_ratio` is at most about
    1.
    """

    name: str
    spot: Offer | None
    fixed: Offer | None
    run_time_ratio: float = 1.0

    def spot_usd(self, nodes: int) -> float:
        """Return what it costs to do an hour's work of the reference machine on spot in this
        market, in dollars for the whole gang. If the market has no spot, the result is so high that
        the market is never chosen.
        """
        return _usd(self.spot, nodes) * self.run_time_ratio

    def fixed_usd(self, nodes: int) -> float:
        return _usd(self.fixed, nodes) * self.run_time_ratio


class PolicyInputs(Struct, frozen=True, kw_only=True):
    """The inputs of a policy for one job."""

    places: tuple[SteeredMarket, ...]
    terms: JobTerms  # the job's terms, including the safety margins
    nodes: int
    # The duration of the whole work on the reference machine
    run_time: timedelta = field(default=timedelta(0))
    # The time from a launch until the work continues, without the time to repeat lost work.
    start: timedelta = field(default=timedelta(0))

    def index(self, offer: Offer | None) -> int:
        """Return the index of the offer's market. Returns NOWHERE if the offer is None or belongs
        to no market.
        """
        if offer is None:
            return NOWHERE
        return next((i for i, p in enumerate(self.places) if p.name == _name(offer)), NOWHERE)


def find_inputs(
    task: TaskSpec,
    offers: Sequence[Offer],
    knowledge: MarketKnowledge,
    progress: JobProgress,
    *,
    floor: bool = True,
    most: int = MOST_MARKETS,
) -> PolicyInputs | None:
    """Return the markets and terms of a job that should meet its deadline at the lowest cost.

    The result is None if the policy cannot be used: spot or on-demand is not allowed or not
    offered, the running time is unknown, or (with `floor`) even the fastest on-demand machine would
    miss the deadline.
    """
    if task.resources.spot is not SpotPolicy.AUTO:
        return None
    times = {
        offer.key: length * progress.pace
        for offer in offers
        if not offer.shared and (length := run_time_on(task, offer))
    }
    fixed = [
        offer for offer in offers if offer.key in times and offer.purchase is Purchase.ON_DEMAND
    ]
    if not fixed or all(offer.purchase is not Purchase.SPOT for offer in offers):
        return None
    room = progress.deadline - progress.submitted_at
    cheapest = _reference(fixed, times, room)
    reference = times[cheapest.key]
    if reference >= room and floor:
        return None
    alike = [offer for offer in offers if times.get(offer.key, timedelta.max) <= reference * _ALIKE]
    places = _nearest(_places(alike, times), progress, most)
    start = _start(task, places, knowledge, progress)
    margins = PolicyMargins(again_s=_again(task, reference).total_seconds())
    return PolicyInputs(
        places=tuple(places),
        terms=margins.keep(_terms(task, places, progress, reference, start)),
        nodes=task.nodes,
        run_time=reference,
        start=start,
    )


def _reference(fixed: Sequence[Offer], times: Mapping[str, timedelta], room: timedelta) -> Offer:
    """Return the machine that meets the deadline at the lowest cost. If no machine meets the
    deadline, return the fastest machine.
    """
    in_time = [offer for offer in fixed if times[offer.key] < room]
    if in_time:
        return min(in_time, key=lambda offer: (_cost(offer, times[offer.key]), offer.key))
    return min(fixed, key=lambda offer: (times[offer.key], offer.rate, offer.key))


def _terms(
    task: TaskSpec,
    places: Sequence[SteeredMarket],
    progress: JobProgress,
    reference: timedelta,
    start: timedelta,
) -> JobTerms:
    markets = (
        PolicyMarket(
            name=place.name,
            region=place.name.rpartition("/")[0],
            on_demand_usd_hr=place.fixed_usd(task.nodes),
        )
        for place in places
    )
    return JobTerms(
        work_s=reference.total_seconds(),
        deadline_s=(progress.deadline - progress.submitted_at).total_seconds(),
        overhead_s=start.total_seconds(),
        markets=tuple(markets),
        move_usd=_moves(task, places, progress),
    )


def run_time_on(task: TaskSpec, offer: Offer) -> timedelta | None:
    """Return the running time on an offer without interruptions, estimated from the task's `work`.
    If the task states no work, the task's maximum duration is used as the running time. The result
    is None if the running time cannot be estimated, or if the task states neither work nor a
    maximum duration.
    """
    if task.work is not None:
        return estimate(task, offer).run_time
    return task.limits.duration


def share_done(task: TaskSpec, attempts: Sequence[Attempt], now: datetime, current: int) -> float:
    """Return the share of the work that all attempts together have done. For an earlier attempt,
    the work up to its last checkpoint counts; for the current attempt, all work up to now counts.
    """
    return min(_share_expected(task, attempts, now, current), 1.0)


def find_pace(
    task: TaskSpec, attempts: Sequence[Attempt], now: datetime, current: int, done: float
) -> float:
    """Return the time that the work done so far took, as a multiple of its estimate. `done` is the
    share of the work that the task reports. The estimate counts like `_PACE_PRIOR` of measured
    work, so the first minutes, which also contain the start of the program, change little.
    """
    own = next((attempt for attempt in attempts if attempt.number == current), None)
    whole = run_time_on(task, own.offer) if own is not None else None
    if not whole or not 0 < done <= 1:
        return 1.0
    prior = _PACE_PRIOR / whole
    pace = (_share_expected(task, attempts, now, current) + prior) / (done + prior)
    return min(max(pace, _FASTEST_PACE), _SLOWEST_PACE)


def _share_expected(
    task: TaskSpec, attempts: Sequence[Attempt], now: datetime, current: int
) -> float:
    """Return the share of the work that the attempts have done according to the estimate, which is
    more than 1 if the work takes longer.
    """
    done = 0.0
    for attempt in attempts:
        whole = run_time_on(task, attempt.offer)
        if attempt.running_at is None or not whole:
            continue
        until = attempt.checkpoint_at if task.checkpoint is not None else None
        if attempt.number == current and attempt.finished_at is None:
            until = now
        if until is not None and until > attempt.running_at:
            done += (until - attempt.running_at) / whole
    return done


def _cost(offer: Offer, length: timedelta) -> float:
    return offer.rate.micros_per_hour * length.total_seconds()


def _places(offers: Sequence[Offer], times: Mapping[str, timedelta]) -> list[SteeredMarket]:
    """Return the markets. The spot offers come first, each with the on-demand offer of the same
    machine; the machines without spot follow.
    """
    fixed: dict[tuple[object, ...], Offer] = {}
    for offer in offers:
        if offer.purchase is Purchase.ON_DEMAND:
            for zone in {offer.zone, None}:
                known = fixed.get((*_kind(offer), zone))
                if known is None or offer.rate < known.rate:
                    fixed[(*_kind(offer), zone)] = offer
    places: list[SteeredMarket] = []
    paired: set[str] = set()
    reference = max(times[offer.key] for offer in offers)
    for offer in offers:
        if offer.purchase is Purchase.SPOT:
            mate = fixed.get((*_kind(offer), offer.zone)) or fixed.get((*_kind(offer), None))
            paired.add(mate.key if mate else "")
            places.append(SteeredMarket(_name(offer), offer, mate, times[offer.key] / reference))
    for offer in offers:
        if offer.purchase is Purchase.ON_DEMAND and offer.key not in paired:
            places.append(SteeredMarket(_name(offer), None, offer, times[offer.key] / reference))
    return places


def _kind(offer: Offer) -> tuple[object, ...]:
    return offer.provider, offer.region, offer.instance_type, offer.accelerator_count


def _name(offer: Offer) -> str:
    return offer.key.rpartition("/")[0]


def _nearest(places: list[SteeredMarket], progress: JobProgress, most: int) -> list[SteeredMarket]:
    """Return the markets with the cheapest spot (as many as `most` says), the market with the
    cheapest on-demand offer, and the job's current and last market. The number of markets is
    limited because a policy compares all pairs of markets.
    """

    def by_spot(place: SteeredMarket) -> tuple[float, str]:
        return (
            place.spot.rate.micros_per_hour * place.run_time_ratio if place.spot else inf
        ), place.name

    def by_fixed(place: SteeredMarket) -> tuple[float, str]:
        return (
            place.fixed.rate.micros_per_hour * place.run_time_ratio if place.fixed else inf
        ), place.name

    chosen = sorted(places, key=by_spot)[:most]
    best = min(places, key=by_fixed)
    here = [
        p
        for p in places
        for o in (progress.current, progress.home)
        if o is not None and p.name == _name(o)
    ]
    for place in (best, *here):
        if place not in chosen:
            chosen.append(place)
    return chosen


def _usd(offer: Offer | None, nodes: int) -> float:
    return offer.rate.micros_per_hour / 1e6 * nodes if offer is not None else 1e6


def _moves(
    task: TaskSpec, places: Sequence[SteeredMarket], progress: JobProgress
) -> tuple[tuple[float, ...], ...]:
    """Return the price of copying the checkpoint between each pair of markets, or () if all copies
    are free.

    The copy is charged by the cloud from which the bytes are sent. The bytes are sent from the
    bucket's cloud if the checkpoint is in a bucket, otherwise from the gang's cloud.
    """
    stated = task.checkpoint.size_mib if task.checkpoint is not None else None
    size_gb = (progress.saved_bytes or (stated or 0) * _MIB) / _GB
    if task.checkpoint is None or not size_gb or not progress.egress:
        return ()
    bucket = _BUCKETS.get((task.checkpoint.storage or "").partition("://")[0])

    def price(source: SteeredMarket, target: SteeredMarket) -> float:
        left, here = _region(source), _region(target)
        # The bucket is assumed to be in the same region as the nodes of its cloud.
        if left == here or bucket == here[0]:
            return 0.0
        at = (bucket, "") if bucket else left
        per_gb = progress.egress.get("/".join(at), progress.egress.get(at[0]))
        return per_gb.micros / 1e6 * size_gb if per_gb else 0.0

    moves = tuple(tuple(price(source, target) for target in places) for source in places)
    return moves if any(any(row) for row in moves) else ()


def _region(place: SteeredMarket) -> tuple[str, str]:
    offer = place.spot or place.fixed
    assert offer is not None
    return find_cloud(offer.provider), offer.region


def _start(
    task: TaskSpec,
    places: Sequence[SteeredMarket],
    knowledge: MarketKnowledge,
    progress: JobProgress,
) -> timedelta:
    """Return the time from a launch until the work begins. The estimate is cautious: it is the
    longest boot time of all markets plus the time of the setup.
    """
    offers = [offer for place in places for offer in (place.spot, place.fixed) if offer is not None]
    boot = max(knowledge.of(each.key).expect_boot(each.boot) for each in offers)
    return boot + (
        progress.setup
        if progress.setup is not None
        else _SETUP_PRIOR
        if task.setup
        else timedelta(0)
    )


def _again(task: TaskSpec, reference: timedelta) -> timedelta:
    """Return the largest amount of unsaved work that a new gang must repeat: a whole checkpoint
    interval, but at most half of the work. A task without checkpoints repeats all its work.
    """
    if task.checkpoint is None:
        return reference
    every, write = chosen_interval(task.checkpoint, SPOT_PREEMPTIONS_PER_HOUR * task.nodes)
    return min((every or timedelta(0)) + write, reference / 2)


def is_about_as_cheap(task: TaskSpec, offer: Offer, other: Offer) -> bool:
    """Return whether the cost of the whole work on `offer` is at most `ABOUT` times the cost on
    `other`.
    """
    lengths = run_time_on(task, offer), run_time_on(task, other)
    one = _cost(offer, lengths[0]) if lengths[0] and lengths[1] else offer.rate.micros_per_hour
    two = _cost(other, lengths[1]) if lengths[0] and lengths[1] else other.rate.micros_per_hour
    return one <= two * ABOUT

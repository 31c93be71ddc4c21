"""Ranks the offers that fit a task. `control` uses the ranking to place jobs, and the command
`plan` shows it.

The catalog decides which offers fit. This module orders the offers and checks the task's limits.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from heapq import nsmallest
from operator import itemgetter

from cavvy.costs.extras import expect_extras
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.units import (
    HourlyRate,
    Money,
    count_decimals,
    format_duration,
    format_rate,
    format_usd,
)
from cavvy.domain.values import Struct, replace
from cavvy.planner.objections import note_slice
from cavvy.planner.placements import (
    LimitMiss,
    Objective,
    Placement,
    PlacementPlan,
    PlanLimit,
    PlanningContext,
    RankingView,
    SpotLoss,
    TaskLimiter,
)
from cavvy.planner.risk import (
    SPOT_PREEMPTIONS_PER_HOUR,
    chosen_interval,
    disturb,
    fit_stated,
    say_fit,
)
from cavvy.planner.shared_hosts import note_share
from cavvy.planner.transfers import TransferEstimate, estimate_transfers, find_egress
from cavvy.planner.work import estimate, margin_of, shape_of, start_time

_LONG = timedelta.max
_MIB = 1 << 20
_GB = 10**9
_NO_PRICES: Mapping[str, Money] = {}


def warn_of_notices(
    task: TaskSpec, offers: Iterable[Offer], notices: Mapping[str, timedelta]
) -> tuple[str, ...]:
    """Warn about each provider whose spot preemption notice is unknown or too short to save a
    checkpoint of the size that the task states. `offers` may include offers that are not in the
    plan.
    """
    spots = sorted({offer.provider for offer in offers if offer.purchase is Purchase.SPOT})
    said: dict[str, list[str]] = {}
    for name in spots:
        notice = notices.get(name)
        fit = fit_stated(task, notice or timedelta(0))
        for text in (
            say_fit(task, notice) if fit is not None and (notice is None or not fit.fits) else ()
        ):
            said.setdefault(text, []).append(name)
    return tuple(f"spot at {', '.join(names)}: {text}" for text, names in said.items())


def warn_of_dear_spot(
    task: TaskSpec,
    spots: Iterable[Offer],
    fixed: Iterable[Offer],
    now: datetime,
    situation: PlanningContext,
) -> tuple[str, ...]:
    """If a task that allows only spot would be cheaper on demand, return a warning with the
    reason.
    """
    best, other = (_cheapest(task, offers, now, situation) for offers in (spots, fixed))
    if (
        best is None
        or other is None
        or best.cost is None
        or other.cost is None
        or best.cost <= other.cost
    ):
        return ()
    lost, why = best.spot_loss, ""
    if lost is not None and lost.cost is not None and lost.preemptions is not None:
        why = (
            f", of which {format_usd(lost.cost)} is for repeated work and "
            f"{lost.preemptions:.1f} new starts"
        )
    do = "write a `checkpoint`" if task.checkpoint is None else "write checkpoints more often"
    return (
        f"spot is expected to cost more than on-demand: {format_usd(best.cost)} at "
        f"{best.offer.key}{why}, compared with {format_usd(other.cost)} at {other.offer.key}; "
        f"{do}, or let `spot: auto` choose",
    )


def _cheapest(
    task: TaskSpec, offers: Iterable[Offer], now: datetime, situation: PlanningContext
) -> Placement | None:
    return next(
        iter(
            plan(task, offers, now=now, situation=situation, view=RankingView(limit=1)).placements
        ),
        None,
    )


def rank(
    task: TaskSpec,
    offers: Iterable[Offer],
    *,
    now: datetime,
    avoid: Collection[str] = (),
    by: Objective = Objective.COST,
    situation: PlanningContext | None = None,
) -> list[Placement]:
    """Return the placements within the task's limits, best first, in the same order as in
    `plan`.
    """
    known = situation or PlanningContext()
    if avoid:
        known = replace(known, avoid=frozenset(avoid) | frozenset(known.avoid))
    return list(plan(task, offers, now=now, by=by, situation=known).placements)


def plan(
    task: TaskSpec,
    offers: Iterable[Offer],
    *,
    now: datetime,
    by: Objective = Objective.COST,
    situation: PlanningContext | None = None,
    view: RankingView | None = None,
) -> PlacementPlan:
    """Rank `offers`, each of which fits one node of `task`, and count the offers that would break a
    limit.

    Offers in `avoid` come last, with `avoided` set, so that a caller that prefers to wait can drop
    these offers. Offers whose provider reports that too few nodes are free come directly before the
    offers in `avoid`. If the objective is cost, offers with a known total cost come first, ordered
    by total cost; all other offers follow, ordered by price per hour. If the objective is time, the
    expected finish is compared before the total cost. If two offers are equal, the lower price per
    hour decides, then the smaller key, so that equal inputs give equal results.
    """
    known = situation or PlanningContext()
    course, copies = _Courses(task, known.done), _Copies(task, known.egress)
    limiter = TaskLimiter(task, known, now)
    kept: list[_Scored] = []
    misses = _Misses()
    for offer in offers:
        scored = _score(task, offer, course(offer), known, copies)
        broken = tuple(limiter.broken(offer, *_at_most(task, scored)))
        if broken:
            misses.add(scored, broken)
        else:
            kept.append(scored)
    best_first = _best(kept, _order(task, known.avoid, by), view or RankingView())
    return PlacementPlan(
        placements=tuple(_placement(task, scored, known, now) for scored in best_first),
        considered=len(kept) + misses.rejected.total(),
        kept=len(kept),
        rejected={which: misses.rejected[which] for which in misses.limits()},
        misses=tuple(
            _explain(limiter, task, misses.nearest[which][1]) for which in misses.limits()
        ),
    )


class _Misses:
    """Counts offers by the first limit that they break, and stores the nearest miss for each
    limit.
    """

    def __init__(self) -> None:
        self.rejected: Counter[PlanLimit] = Counter()
        self.nearest: dict[PlanLimit, tuple[_Nearness, _Scored]] = {}

    def add(self, scored: "_Scored", broken: Sequence[tuple[PlanLimit, float]]) -> None:
        which = broken[0][0]
        self.rejected[which] += 1
        miss = _nearness(scored, broken), scored
        self.nearest[which] = min(self.nearest.get(which, miss), miss, key=itemgetter(0))

    def limits(self) -> list[PlanLimit]:
        """Return the limits that reject offers, in the order of `PlanLimit`. Each offer counts only
        for the first limit that it breaks.
        """
        return [which for which in PlanLimit if which in self.nearest]


def order_of(
    task: TaskSpec, avoid: Collection[str] = (), egress: Mapping[str, Money] = _NO_PRICES
) -> Callable[[Offer], tuple[object, ...]]:
    """Return a function that computes the key by which `plan` sorts an offer if the objective is
    cost. Lower is better.

    Limits are ignored. The key covers the whole work, including completed work, so that offers for
    different alternatives of a task can be compared.
    """
    course, order = _Courses(task, 0.0), _order(task, avoid, Objective.COST)
    known, copies = PlanningContext(egress=egress), _Copies(task, egress)
    return lambda offer: order(_score(task, offer, course(offer), known, copies))


class _Course(Struct, frozen=True, kw_only=True):
    """The expected times and preemptions of an offer. The times and preemptions are equal for all
    offers with the same shape.
    """

    run_time: timedelta | None
    spread: float
    wall_time: timedelta | None
    loss: SpotLoss | None
    notes: tuple[str, ...]


class _Courses:
    """Computes the expected times and preemptions only once for each shape, because a catalog has
    many offers but few shapes.
    """

    def __init__(self, task: TaskSpec, done: float) -> None:
        self._task = task
        self._done = done
        self._known: dict[tuple[object, ...], _Course] = {}

    def __call__(self, offer: Offer) -> _Course:
        shape = shape_of(offer, self._task)
        course = self._known.get(shape)
        if course is None:
            course = self._known[shape] = _expect(self._task, offer, self._done)
        return course


class _Copies:
    """Estimates the time of copying inputs and outputs, only once for each combination of location,
    network speed and number of starts."""

    def __init__(self, task: TaskSpec, egress: Mapping[str, Money]) -> None:
        self._task, self._egress = task, egress
        self._known: dict[tuple[object, ...], TransferEstimate | None] = {}

    def __call__(self, offer: Offer, starts: float) -> TransferEstimate | None:
        key = offer.provider, offer.region, offer.shared, offer.network_mbps, starts
        if key not in self._known:
            self._known[key] = estimate_transfers(self._task, offer, self._egress, starts)
        return self._known[key]


def _expect(task: TaskSpec, offer: Offer, done: float) -> _Course:
    estimated = estimate(task, offer)
    start = start_time(offer)
    run = None if estimated.run_time is None else estimated.run_time * (1 - done)
    steady = _Course(
        run_time=run,
        spread=estimated.spread,
        wall_time=None if run is None else start + run,
        loss=None,
        notes=estimated.notes,
    )
    if offer.purchase is not Purchase.SPOT:
        return steady
    per_hour = SPOT_PREEMPTIONS_PER_HOUR * task.nodes
    every, write = chosen_interval(task.checkpoint, per_hour)
    course = (
        None
        if run is None
        else disturb(run, start=start, per_hour=per_hour, every=every, write=write)
    )
    notes = (*steady.notes, *_spot_notes(task, per_hour, every))
    if run is None or course is None:
        loss = SpotLoss(per_hour=per_hour, checkpoint_every=every)
        if run is not None:
            notes = (
                *notes,
                "unlikely to finish on spot: write checkpoints, or write them more often",
            )
        return replace(steady, wall_time=None, loss=loss, notes=notes)
    extra = course.wall_time - start - run
    loss = SpotLoss(
        per_hour=per_hour, checkpoint_every=every, preemptions=course.preemptions, time=extra
    )
    if task.retry.preemption is not None and course.preemptions > task.retry.preemption:
        notes = (
            *notes,
            f"more preemptions are expected than the {task.retry.preemption} that "
            "retry.preemption allows",
        )
    return replace(steady, wall_time=course.wall_time, loss=loss, notes=notes)


def _spot_notes(task: TaskSpec, per_hour: float, every: timedelta | None) -> tuple[str, ...]:
    between = f"preempted about every {format_duration(timedelta(hours=1 / per_hour))} (assumed)"
    if every is None:
        return (f"{between}; without a checkpoint, the work restarts from the beginning each time",)
    if task.checkpoint is not None and task.checkpoint.every is None:
        return (f"{between}; the estimate assumes a checkpoint every {format_duration(every)}",)
    return (between,)


class _Scored(Struct, frozen=True):
    offer: Offer
    course: _Course
    rate: HourlyRate  # the rate of all machines of the gang
    extras: HourlyRate  # the expected rate of the disks and public addresses of the gang
    cost: Money | None
    egress: Money | None
    transfers: TransferEstimate | None = None

    @property
    def whole(self) -> HourlyRate:
        return HourlyRate(self.rate.micros_per_hour + self.extras.micros_per_hour)


_Nearness = tuple[bool, int, float, HourlyRate, str]


def _nearness(scored: _Scored, broken: Sequence[tuple[PlanLimit, float]]) -> _Nearness:
    """Return the sort key of an offer that breaks limits; offers closest to the limits come first.
    The key compares, in this order: whether the work is expected to finish, the number of broken
    limits, the excess, and the price.
    """
    doubtful = scored.course.run_time is not None and scored.course.wall_time is None
    return doubtful, len(broken), broken[0][1], scored.offer.rate, scored.offer.key


def _explain(limiter: TaskLimiter, task: TaskSpec, scored: _Scored) -> LimitMiss:
    return limiter.explain(scored.offer, *_at_most(task, scored))


def _at_most(
    task: TaskSpec, scored: _Scored
) -> tuple[timedelta | None, timedelta | None, Money | None]:
    """Return the running time, the time to the end and the cost, if the work takes as long as it
    may.
    """
    course, cost, margin = scored.course, scored.cost, margin_of(task, scored.offer)
    if margin == 1 or course.run_time is None:
        return course.run_time, course.wall_time, cost
    wall = course.wall_time and course.wall_time + course.run_time * (margin - 1)
    return course.run_time * margin, wall, cost and Money(round(cost.micros * margin))


def _score(
    task: TaskSpec, offer: Offer, course: _Course, known: PlanningContext, copies: "_Copies"
) -> _Scored:
    rate = offer.rate.times(task.nodes)
    extras = _extras(task, offer)
    preemptions = course.loss.preemptions if course.loss is not None else None
    starts = 1 + (preemptions or 0)
    transfers = copies(offer, starts)
    if transfers is not None and course.wall_time is not None:
        course = replace(course, wall_time=course.wall_time + transfers.time_of(starts))
    scored = _Scored(offer, course, rate, extras, None, _egress(offer, known), transfers)
    if course.wall_time is None:
        return scored
    # The minimum is charged for the lifetime of each node. The minimum is counted once, because
    # replacement nodes are few and usually run longer than the minimum.
    cost = scored.whole.over(max(course.wall_time, offer.minimum_charge))
    if transfers is not None:
        cost += transfers.cost
    return replace(scored, cost=cost + scored.egress if scored.egress else cost)


def _has_unsized(task: TaskSpec) -> bool:
    """Return whether the task has outputs of unknown size."""
    return any(each.size_mib is None for each in task.outputs)


def _extras(task: TaskSpec, offer: Offer) -> HourlyRate:
    """Return the expected rate of the disks and public addresses of all nodes together."""
    need = task.resources
    return expect_extras(offer, need.disk_gib, need.disk_type).times(task.nodes)


def egress_price(offer: Offer, known: PlanningContext) -> Money | None:
    """Return the price of one GB (10^9 bytes) of egress from the offer's location, or None if the
    price is unknown.
    """
    return find_egress(offer, known.egress)


def _egress(offer: Offer, known: PlanningContext) -> Money | None:
    price = egress_price(offer, known) if known.output_mib is not None else None
    if price is None or known.output_mib is None:
        return None
    return Money((2 * price.micros * known.output_mib * _MIB + _GB) // (2 * _GB))


def _best(
    kept: list[_Scored], order: Callable[[_Scored], tuple[object, ...]], view: RankingView
) -> list[_Scored]:
    if view.distinct:
        groups: dict[tuple[str, str, int, Purchase], tuple[tuple[object, ...], _Scored]] = {}
        for scored in kept:
            offer, place = scored.offer, order(scored)
            group = (offer.provider, offer.instance_type, offer.accelerator_count, offer.purchase)
            if group not in groups or place < groups[group][0]:
                groups[group] = (place, scored)
        kept = [scored for _, scored in groups.values()]
    return sorted(kept, key=order) if view.limit is None else nsmallest(view.limit, kept, key=order)


def _order(
    task: TaskSpec, avoid: Collection[str], by: Objective
) -> Callable[[_Scored], tuple[object, ...]]:
    def order(scored: _Scored) -> tuple[object, ...]:
        key = scored.offer.key
        wall = scored.course.wall_time or _LONG
        cost = scored.cost.micros if scored.cost is not None else -1
        measure = (cost, wall) if by is Objective.COST else (wall, cost)
        late = (bool(avoid) and key in avoid, not _is_available(task, scored.offer))
        return (*late, scored.cost is None, *measure, scored.whole.micros_per_hour, key)

    return order


def _is_available(task: TaskSpec, offer: Offer) -> bool:
    return offer.capacity is None or offer.capacity >= task.nodes


def _placement(task: TaskSpec, scored: _Scored, known: PlanningContext, now: datetime) -> Placement:
    offer, course = scored.offer, scored.course
    loss = course.loss
    if loss is not None and loss.time is not None:
        loss = replace(loss, cost=scored.rate.over(loss.time))
    return Placement(
        offer=offer,
        nodes=task.nodes,
        rate=scored.rate,
        run_time=course.run_time,
        spread=course.spread,
        wall_time=course.wall_time,
        finish=None if course.wall_time is None else now + course.wall_time,
        cost=scored.cost,
        spot_loss=loss,
        egress=scored.egress,
        transfer=None if scored.transfers is None else scored.transfers.cost,
        transfer_time=None if scored.transfers is None else scored.transfers.time,
        available=_is_available(task, offer),
        avoided=bool(known.avoid) and offer.key in known.avoid,
        notes=tuple(_list_notes(task, scored, known)),
    )


def _list_notes(task: TaskSpec, scored: _Scored, known: PlanningContext) -> list[str]:
    """Return the notes that are shown with a placement."""
    offer, notes = scored.offer, []
    if not _is_available(task, offer):
        limited = f", limited by {offer.limited_by}" if offer.limited_by else ""
        notes.append(f"only {offer.capacity} of {task.nodes} nodes are free now{limited}")
    if about_slice := note_slice(offer):
        notes.append(about_slice)
    if about_share := note_share(task, offer):
        notes.append(about_share)
    notes += scored.course.notes
    if scored.transfers is not None:
        notes += scored.transfers.notes()
    if offer.purchase is Purchase.SPOT:
        notes += say_fit(task, known.notices.get(offer.provider))
    if scored.extras.micros_per_hour:
        total = "" if scored.cost is None else ", which the total includes"
        notes.append(f"disks and public addresses cost {format_rate(scored.extras)} more{total}")
    price = egress_price(offer, known)
    if known.output_mib is not None and scored.egress is None:
        notes.append("the egress price is unknown and not included in the total")
    elif known.output_mib is None and _has_unsized(task) and price:
        shown = format_usd(price, count_decimals([price]))
        notes.append(f"egress costs {shown}/GB, which the total does not include")
    if scored.cost is None and task.limits.budget is not None and scored.rate.micros_per_hour:
        left = task.limits.budget - known.spent
        hours = timedelta(hours=max(0, left.micros) / scored.whole.micros_per_hour)
        notes.append(f"the budget lasts {format_duration(hours)}")
    return notes

"""Estimates the cost of a task on one offer and the time until the task ends, and compares these
estimates. `rank` ranks offers with it; `shortlist` finds the offers that can be among the first.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta

from cavvy.costs.extras import expect_extras
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.units import HourlyRate, Money, format_duration
from cavvy.domain.values import Struct, replace
from cavvy.planner.placements import Objective, PlanLimit, PlanningContext, SpotLoss
from cavvy.planner.risk import SPOT_PREEMPTIONS_PER_HOUR, chosen_interval, disturb
from cavvy.planner.transfers import TransferEstimate, estimate_transfers, find_egress
from cavvy.planner.work import estimate, margin_of, shape_of, start_time

_LONG = timedelta.max
_MIB = 1 << 20
_GB = 10**9


class Course(Struct, frozen=True, kw_only=True):
    """The expected times and preemptions of an offer. The times and preemptions are equal for all
    offers with the same shape.
    """

    run_time: timedelta | None
    spread: float
    wall_time: timedelta | None
    loss: SpotLoss | None
    notes: tuple[str, ...]


class Courses:
    """Computes the expected times and preemptions only once for each shape, because a catalog has
    many offers but few shapes.
    """

    def __init__(self, task: TaskSpec, done: float) -> None:
        self._task = task
        self._done = done
        self._known: dict[tuple[object, ...], Course] = {}

    def __call__(self, offer: Offer) -> Course:
        shape = shape_of(offer, self._task)
        course = self._known.get(shape)
        if course is None:
            course = self._known[shape] = _expect(self._task, offer, self._done)
        return course


class Copies:
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


class ScoredOffer(Struct, frozen=True):
    offer: Offer
    course: Course
    rate: HourlyRate  # the rate of all machines of the gang
    extras: HourlyRate  # the expected rate of the disks and public addresses of the gang
    cost: Money | None
    egress: Money | None
    transfers: TransferEstimate | None = None

    @property
    def whole(self) -> HourlyRate:
        return HourlyRate(self.rate.micros_per_hour + self.extras.micros_per_hour)


Nearness = tuple[bool, int, float, HourlyRate, str]


def score(
    task: TaskSpec, offer: Offer, course: Course, known: PlanningContext, copies: "Copies"
) -> ScoredOffer:
    rate = offer.rate.times(task.nodes)
    extras = _extras(task, offer)
    preemptions = course.loss.preemptions if course.loss is not None else None
    starts = 1 + (preemptions or 0)
    transfers = copies(offer, starts)
    if transfers is not None and course.wall_time is not None:
        course = replace(course, wall_time=course.wall_time + transfers.time_of(starts))
    scored = ScoredOffer(offer, course, rate, extras, None, _egress(offer, known), transfers)
    if course.wall_time is None:
        return scored
    # The minimum is charged for the lifetime of each node. The minimum is counted once, because
    # replacement nodes are few and usually run longer than the minimum.
    cost = scored.whole.over(max(course.wall_time, offer.minimum_charge))
    if transfers is not None:
        cost += transfers.cost
    return replace(scored, cost=cost + scored.egress if scored.egress else cost)


def at_most(
    task: TaskSpec, scored: ScoredOffer
) -> tuple[timedelta | None, timedelta | None, Money | None]:
    """Return the running time, the time to the end and the cost, if the work takes as long as it
    may.
    """
    course, cost, margin = scored.course, scored.cost, margin_of(task, scored.offer)
    if margin == 1 or course.run_time is None:
        return course.run_time, course.wall_time, cost
    wall = course.wall_time and course.wall_time + course.run_time * (margin - 1)
    return course.run_time * margin, wall, cost and Money(round(cost.micros * margin))


def nearness(scored: ScoredOffer, broken: Sequence[tuple[PlanLimit, float]]) -> Nearness:
    """Return the sort key of an offer that breaks limits; offers closest to the limits come first.
    The key compares, in this order: whether the work is expected to finish, the number of broken
    limits, the excess, and the price.
    """
    doubtful = scored.course.run_time is not None and scored.course.wall_time is None
    return doubtful, len(broken), broken[0][1], scored.offer.rate, scored.offer.key


def make_order(
    task: TaskSpec, avoid: Collection[str], by: Objective
) -> Callable[[ScoredOffer], tuple[object, ...]]:
    def order(scored: ScoredOffer) -> tuple[object, ...]:
        key = scored.offer.key
        wall = scored.course.wall_time or _LONG
        cost = scored.cost.micros if scored.cost is not None else -1
        measure = (cost, wall) if by is Objective.COST else (wall, cost)
        late = (bool(avoid) and key in avoid, not is_available(task, scored.offer))
        return (*late, scored.cost is None, *measure, scored.whole.micros_per_hour, key)

    return order


def is_available(task: TaskSpec, offer: Offer) -> bool:
    return offer.capacity is None or offer.capacity >= task.nodes


def egress_price(offer: Offer, known: PlanningContext) -> Money | None:
    """Return the price of one GB (10^9 bytes) of egress from the offer's location, or None if the
    price is unknown.
    """
    return find_egress(offer, known.egress)


def _extras(task: TaskSpec, offer: Offer) -> HourlyRate:
    """Return the expected rate of the disks and public addresses of all nodes together."""
    need = task.resources
    return expect_extras(offer, need.disk_gib, need.disk_type).times(task.nodes)


def _egress(offer: Offer, known: PlanningContext) -> Money | None:
    price = egress_price(offer, known) if known.output_mib is not None else None
    if price is None or known.output_mib is None:
        return None
    return Money((2 * price.micros * known.output_mib * _MIB + _GB) // (2 * _GB))


def _expect(task: TaskSpec, offer: Offer, done: float) -> Course:
    estimated = estimate(task, offer)
    start = start_time(offer)
    run = None if estimated.run_time is None else estimated.run_time * (1 - done)
    steady = Course(
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

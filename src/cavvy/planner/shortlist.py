"""Finds the offers of the catalog that can be among the first of a plan, without an estimate for
each of the catalog's many offers. `cavvy plan` reads and ranks only these offers.

The offers of a lot differ only in location and price, and a task takes the same time on all lots of
one kind of machine. Among such offers, a cheaper one is never worse: its total is lower, and it
meets each limit that the dearer one meets. So the lots of each kind are scored from the cheapest
on, and only until enough offers are found.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from heapq import heapify, heappop, heappush
from operator import attrgetter

from cavvy.catalog.fit import OfferLot
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import Struct, replace
from cavvy.planner.placements import (
    Objective,
    PlanCounts,
    PlanLimit,
    PlanningContext,
    RankingView,
    TaskLimiter,
)
from cavvy.planner.scoring import Copies, Courses, ScoredOffer, at_most, make_order, nearness, score
from cavvy.planner.work import shape_of


def shorten(
    task: TaskSpec,
    lots: Sequence[OfferLot],
    *,
    now: datetime,
    by: Objective,
    situation: PlanningContext,
    view: RankingView,
) -> tuple[Sequence[OfferLot], PlanCounts]:
    """Return the lots whose offers must be ranked, and the counts of all other offers. The plan of
    the returned lots with these counts equals the plan of all lots, if the plan has the same
    arguments. `situation` has no offers to avoid.

    The lots must have been made with `transfers.group_places`.
    """
    search = _Search(task, now, by, situation)
    kinds = [search.sort(each) for each in search.split(lots)]
    chosen = {_key(lot): lot for lot in search.walk(kinds, view)}
    for kind in kinds:
        chosen |= {_key(lot): lot for lot in kind.mixed}
    chosen |= {_key(lot): lot for lot in search.list_misses(kinds)}
    kept, rejected = 0, Counter[PlanLimit]()
    for kind in kinds:
        kept += sum(lot.count for lot in kind.kept if _key(lot) not in chosen)
        left = sum(lot.count for lot in kind.broken if _key(lot) not in chosen)
        if left and kind.limit is not None:
            rejected[kind.limit] += left
    return list(chosen.values()), PlanCounts(kept=kept, rejected=rejected)


def _key(lot: OfferLot) -> tuple[object, ...]:
    return lot.number, lot.sample.purchase, lot.part


class _Kind(Struct):
    """The lots of one kind of machine, by their lowest rate. The lots in `kept` have an offer
    within the limits. Those in `mixed`, a part of `kept`, have also an offer that breaks a limit.
    Those in `broken` have only offers that break `limit` first.
    """

    kept: Sequence[OfferLot]
    mixed: Sequence[OfferLot] = ()
    broken: Sequence[OfferLot] = ()
    limit: PlanLimit | None = None


class _Search:
    """Scores offers of a task."""

    def __init__(
        self, task: TaskSpec, now: datetime, by: Objective, situation: PlanningContext
    ) -> None:
        self._task, self._known = task, situation
        self._course, self._copies = (
            Courses(task, situation.done),
            Copies(task, situation.egress),
        )
        self._limiter = TaskLimiter(task, situation, now)
        self._order = make_order(task, (), by)

    def split(self, lots: Sequence[OfferLot]) -> Iterator[list[OfferLot]]:
        """Yield the lots of each kind, the cheapest first."""
        found: dict[tuple[object, ...], list[OfferLot]] = {}
        copies, works = self._task.inputs or self._task.outputs, self._task.work is not None
        for lot in lots:
            offer = lot.sample
            # Without work, all machines take the same time, which is unknown.
            machine = shape_of(offer, self._task) if works else (offer.purchase,)
            key = (*machine, copies and offer.network_mbps, lot.part)
            found.setdefault(key, []).append(lot)
        for each in found.values():
            yield sorted(each, key=_rate)

    def sort(self, lots: Sequence[OfferLot]) -> _Kind:
        """Sort the lots of one kind by whether their offers are within the limits."""
        if not self._limiter.has_limits or not self._broken(
            self._score(lots[-1].sample, max(lot.most for lot in lots))
        ):
            return _Kind(kept=lots)
        scored = self._score(lots[0].sample)
        if broken := self._broken(scored):
            return _Kind(kept=(), broken=lots, limit=broken[0][0])
        # Only the budget depends on the price: the first rate above it.
        rates = range(_rate(lots[0]), max(lot.most for lot in lots) + 1)
        above = rates[
            bisect_left(
                rates, True, key=lambda rate: bool(self._broken(self._score(lots[0].sample, rate)))
            )
        ]
        kept = [lot for lot in lots if _rate(lot) < above]
        return _Kind(
            kept=kept,
            mixed=[lot for lot in kept if lot.most >= above],
            broken=lots[len(kept) :],
            limit=PlanLimit.BUDGET,
        )

    def walk(self, kinds: Sequence[_Kind], view: RankingView) -> Iterator[OfferLot]:
        """Yield the lots that can have one of the first offers within the limits, best first."""
        heap = [(self._place(kind.kept[0]), at, 0) for at, kind in enumerate(kinds) if kind.kept]
        heapify(heap)
        seen, last = set[tuple[object, ...]](), None
        while heap and (last is None or heap[0][0] == last):
            place, at, number = heappop(heap)
            kept = kinds[at].kept
            yield kept[number]
            seen.add(_group(kept[number]) if view.distinct else _key(kept[number]))
            if len(seen) == view.limit:
                last = place  # offers that are equally good may come first because of their names
            if number + 1 < len(kept):
                heappush(heap, (self._place(kept[number + 1]), at, number + 1))

    def list_misses(self, kinds: Sequence[_Kind]) -> Iterator[OfferLot]:
        """Yield the lots that can have the offer that comes nearest to each limit."""
        for limit in PlanLimit:
            near = [
                (self._miss(lot), lot)
                for kind in kinds
                if kind.limit is limit
                for lot in kind.broken
                if _rate(lot) == _rate(kind.broken[0])
            ]
            least = min((each for each, _ in near), default=None)
            yield from (lot for each, lot in near if each == least)

    def _score(self, offer: Offer, rate: int | None = None) -> ScoredOffer:
        if rate is not None:
            offer = replace(offer, rate=HourlyRate(rate))
        return score(self._task, offer, self._course(offer), self._known, self._copies)

    def _broken(self, scored: ScoredOffer) -> tuple[tuple[PlanLimit, float], ...]:
        return tuple(self._limiter.broken(scored.offer, *at_most(self._task, scored)))

    def _place(self, lot: OfferLot) -> tuple[object, ...]:
        """Return the lot's place in the ranking, without the name of the offer."""
        return self._order(self._score(lot.sample))[:-1]

    def _miss(self, lot: OfferLot) -> tuple[object, ...]:
        scored = self._score(lot.sample)
        return nearness(scored, self._broken(scored))[:-1]


_rate: Callable[[OfferLot], int] = attrgetter("sample.rate.micros_per_hour")


def _group(lot: OfferLot) -> tuple[object, ...]:
    """Return what `RankingView.distinct` compares."""
    offer = lot.sample
    return offer.provider, offer.instance_type, offer.accelerator_count, offer.purchase

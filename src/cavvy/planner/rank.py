"""Ranks the offers that fit a task. `control` uses the ranking to place jobs, and the command
`plan` shows it.

The catalog decides which offers fit. This module orders the offers and checks the task's limits.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from heapq import nsmallest
from operator import itemgetter

from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.units import (
    Money,
    count_decimals,
    format_duration,
    format_rate,
    format_usd,
)
from cavvy.domain.values import replace
from cavvy.planner.objections import note_slice
from cavvy.planner.placements import (
    LimitMiss,
    Objective,
    Placement,
    PlacementPlan,
    PlanCounts,
    PlanLimit,
    PlanningContext,
    RankingView,
    TaskLimiter,
)
from cavvy.planner.risk import fit_stated, say_fit
from cavvy.planner.scoring import (
    Copies,
    Courses,
    Nearness,
    ScoredOffer,
    at_most,
    egress_price,
    is_available,
    make_order,
    nearness,
    score,
)
from cavvy.planner.shared_hosts import note_share

_NO_PRICES: Mapping[str, Money] = {}


def warn_of_notices(
    task: TaskSpec, spots: Collection[str], notices: Mapping[str, timedelta]
) -> tuple[str, ...]:
    """Warn about each provider in `spots` whose spot preemption notice is unknown or too short to
    save a checkpoint of the size that the task states. `spots` are the providers that have fitting
    spot offers, also those that are not in the plan.
    """
    said: dict[str, list[str]] = {}
    for name in sorted(spots):
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
    fixed: Collection[Offer],
    now: datetime,
    situation: PlanningContext,
) -> tuple[str, ...]:
    """If a task that allows only spot would be cheaper on demand, return a warning with the
    reason. `fixed` are the offers on demand.
    """
    if not fixed:
        return ()
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
    others: PlanCounts | None = None,
) -> PlacementPlan:
    """Rank `offers`, each of which fits one node of `task`, and count the offers that would break a
    limit. `others` counts offers that `shortlist` left out.

    Offers in `avoid` come last, with `avoided` set, so that a caller that prefers to wait can drop
    these offers. Offers whose provider reports that too few nodes are free come directly before the
    offers in `avoid`. If the objective is cost, offers with a known total cost come first, ordered
    by total cost; all other offers follow, ordered by price per hour. If the objective is time, the
    expected finish is compared before the total cost. If two offers are equal, the lower price per
    hour decides, then the smaller key, so that equal inputs give equal results.
    """
    known = situation or PlanningContext()
    best, found = _rank(task, offers, now, by, known, view or RankingView(), others)
    return replace(found, placements=tuple(_placement(task, each, known, now) for each in best))


def order_offers(
    task: TaskSpec, offers: Iterable[Offer], *, now: datetime, situation: PlanningContext
) -> tuple[Sequence[Offer], PlacementPlan]:
    """Return the offers of the placements of `plan`, and the plan without these, whose notes take
    about as long as their order."""
    best, found = _rank(task, offers, now, Objective.COST, situation, RankingView(), None)
    return [each.offer for each in best], found


def _rank(
    task: TaskSpec,
    offers: Iterable[Offer],
    now: datetime,
    by: Objective,
    known: PlanningContext,
    view: RankingView,
    others: PlanCounts | None,
) -> tuple[Sequence["ScoredOffer"], PlacementPlan]:
    course, copies = Courses(task, known.done), Copies(task, known.egress)
    limiter = TaskLimiter(task, known, now)
    kept: list[ScoredOffer] = []
    rest = others or PlanCounts()
    misses = _Misses(rest.rejected)
    for offer in offers:
        scored = score(task, offer, course(offer), known, copies)
        broken = tuple(limiter.broken(offer, *at_most(task, scored)))
        if broken:
            misses.add(scored, broken)
        else:
            kept.append(scored)
    best_first = _best(kept, make_order(task, known.avoid, by), view)
    return best_first, PlacementPlan(
        placements=(),
        considered=len(kept) + rest.kept + misses.rejected.total(),
        kept=len(kept) + rest.kept,
        rejected={which: misses.rejected[which] for which in misses.limits()},
        misses=tuple(
            _explain(limiter, task, misses.nearest[which][1]) for which in misses.limits()
        ),
    )


class _Misses:
    """Counts offers by the first limit that they break, and stores the nearest miss for each
    limit.
    """

    def __init__(self, others: Mapping[PlanLimit, int]) -> None:
        self.rejected: Counter[PlanLimit] = Counter(others)
        self.nearest: dict[PlanLimit, tuple[Nearness, ScoredOffer]] = {}

    def add(self, scored: "ScoredOffer", broken: Sequence[tuple[PlanLimit, float]]) -> None:
        which = broken[0][0]
        self.rejected[which] += 1
        miss = nearness(scored, broken), scored
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
    course, order = Courses(task, 0.0), make_order(task, avoid, Objective.COST)
    known, copies = PlanningContext(egress=egress), Copies(task, egress)
    return lambda offer: order(score(task, offer, course(offer), known, copies))


def _explain(limiter: TaskLimiter, task: TaskSpec, scored: ScoredOffer) -> LimitMiss:
    return limiter.explain(scored.offer, *at_most(task, scored))


def _has_unsized(task: TaskSpec) -> bool:
    """Return whether the task has outputs of unknown size."""
    return any(each.size_mib is None for each in task.outputs)


def _best(
    kept: list[ScoredOffer], order: Callable[[ScoredOffer], tuple[object, ...]], view: RankingView
) -> list[ScoredOffer]:
    if view.distinct:
        groups: dict[tuple[str, str, int, Purchase], tuple[tuple[object, ...], ScoredOffer]] = {}
        for scored in kept:
            offer, place = scored.offer, order(scored)
            group = (offer.provider, offer.instance_type, offer.accelerator_count, offer.purchase)
            if group not in groups or place < groups[group][0]:
                groups[group] = (place, scored)
        kept = [scored for _, scored in groups.values()]
    return sorted(kept, key=order) if view.limit is None else nsmallest(view.limit, kept, key=order)


def _placement(
    task: TaskSpec, scored: ScoredOffer, known: PlanningContext, now: datetime
) -> Placement:
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
        available=is_available(task, offer),
        avoided=bool(known.avoid) and offer.key in known.avoid,
        notes=tuple(_list_notes(task, scored, known)),
    )


def _list_notes(task: TaskSpec, scored: ScoredOffer, known: PlanningContext) -> list[str]:
    """Return the notes that are shown with a placement."""
    offer, notes = scored.offer, []
    if not is_available(task, offer):
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

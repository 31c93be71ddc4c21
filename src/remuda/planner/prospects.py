"""Where a waiting job could run: the offers that it may use now, best first, or what keeps it from all of them.

Called by `control` with live offers; what is decided here is who may stand in the queue for what, not whose turn it is.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from remuda.catalog.fit import match_offers
from remuda.catalog.query import Constraint, Matches
from remuda.domain.jobs import Course, Job
from remuda.domain.offers import Offer
from remuda.domain.places import Host
from remuda.domain.tasks import Task
from remuda.domain.units import format_memory, format_rate
from remuda.planner.explain import explain, say_no_offer, wish
from remuda.planner.placements import Plan, Situation
from remuda.planner.rank import plan
from remuda.planner.shares import fits_empty, smallest_shares
from remuda.scheduler.packing import DEFAULT_CPUS

_MANY = 20  # offers that one job is considered for at a time
_DEVICES = {Constraint.ACCELERATOR, Constraint.COUNT, Constraint.ACCELERATOR_MEMORY, Constraint.INSTANCE}
_LONG = timedelta(hours=2)  # offers avoided for longer than failures explain were refused: a person must act

Objections = Callable[[Task, str], Sequence[str]]  # why a provider cannot run a task at all


@dataclass(frozen=True, slots=True, kw_only=True)
class Market:
    """What the configured places offer. `problems` are those that did not answer, with the reason."""

    offers: Sequence[Offer]
    hosts: Sequence[Host] = ()
    problems: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospects:
    """`offers` may be used now. Without any, `reason` says why; `hopeless` that no waiting will help."""

    offers: tuple[Offer, ...] = ()
    reason: str = ""
    hopeless: bool = False
    again_at: datetime | None = None  # when an offer that failed may be tried again
    course: Course | None = None  # the decision that these offers come from, where a policy made one


def find_prospects(
    job: Job, market: Market, matches: Matches, objections: Objections, *, situation: Situation, now: datetime
) -> Prospects:
    """Narrow `matches` (of the job's resources over the market) down to what this job may use now."""
    if not matches.offers:
        return _none_fits(job.task, market, matches)
    able, reasons = _able(job, market, matches.offers, objections)
    if not able:
        return _hopeless(market, "; ".join(reasons))
    allowed = able if job.consented else [offer for offer in able if offer.rate.micros_per_hour == 0]
    if not allowed:
        cheapest = min(offer.rate for offer in able)
        reason = f"every offer that fits costs money, from {format_rate(cheapest)} a node, and paid offers were not"
        return _hopeless(market, f"{reason} consented to: submit it again with --yes, or set limits.budget")
    ranked = plan(job.task, allowed, now=now, situation=situation)
    if not ranked.placements:
        return _hopeless(market, _say(job.task, matches, ranked))
    fine = tuple(place.offer for place in ranked.placements if job.avoid.get(place.offer.key, now) <= now)[:_MANY]
    if fine:
        return Prospects(offers=fine)
    again_at = min(job.avoid[place.offer.key] for place in ranked.placements)
    if again_at - now > _LONG:
        return _hopeless(market, job.reason)
    return Prospects(reason=f"{job.reason}; tried again at {again_at:%H:%M:%S} UTC", again_at=again_at)


def find_usable(job: Job, market: Market, matches: Matches, objections: Objections) -> Sequence[Offer]:
    """The offers that this job may use at all, whatever its limits and what failed lately; cheapest first."""
    able, _ = _able(job, market, matches.offers, objections)
    return able if job.consented else [offer for offer in able if offer.rate.micros_per_hour == 0]


def match(job: Job, market: Market) -> Matches:
    """The offers that can carry one node of the job; depends on nothing of the job but its resources."""
    return match_offers(market.offers, job.task.resources)


def _able(
    job: Job, market: Market, offers: Iterable[Offer], objections: Objections
) -> tuple[list[Offer], Sequence[str]]:
    """The offers whose place can run the task when nothing else runs there, and why the others cannot."""
    task, able, reasons = job.task, [], []
    verdicts: dict[str, Sequence[str]] = {}
    for offer in smallest_shares(task, offers):
        verdict = verdicts.get(offer.provider)
        if verdict is None:
            verdict = verdicts[offer.provider] = objections(task, offer.provider)
            reasons += [f"{offer.provider}: {reason}" for reason in verdict]
        if verdict:
            continue
        if offer.shared and not fits_empty(task, offer, market.hosts):
            reasons.append(_too_many(task, offer))
            continue
        able.append(offer)
    return able, list(dict.fromkeys(reasons))


def _too_many(task: Task, offer: Offer) -> str:
    """Why a gang does not fit on a shared host, and what is there to share."""
    need = replace(task.resources, cpus_min=task.resources.cpus_min or DEFAULT_CPUS)
    node = wish(need).removeprefix("node with ")
    there = f"{offer.vcpus:g} CPUs and {format_memory(offer.memory_mib)}"
    return (
        f"{offer.key}: {task.nodes} nodes with {node} each do not fit there at once (it has {there}); "
        "ask for fewer nodes or smaller ones"
    )


def _none_fits(task: Task, market: Market, matches: Matches) -> Prospects:
    if not matches.total and not market.problems:
        return Prospects(reason="no place offers anything now; see `remuda check`")
    need, names = task.resources, sorted({offer.provider for offer in market.offers})
    here = " and ".join(names)
    if need.providers and not set(need.providers) & set(names):
        asked = " and ".join(need.providers)
        return _hopeless(
            market, f"No offer: the task is for {asked} (resources.providers), and here there are offers of {here} only"
        )
    if not matches.misses and set(matches.rejected) <= _DEVICES:
        return _hopeless(market, f"No offer: no place that is configured here ({here}) has {wish(need)}")
    return _hopeless(market, _say(task, matches, Plan(placements=(), considered=0, kept=0)))


def _say(task: Task, matches: Matches, ranked: Plan) -> str:
    """Why there is no offer and what would have to change."""
    return say_no_offer(task, explain([matches], ranked)).removesuffix(".")


def _hopeless(market: Market, reason: str) -> Prospects:
    """Without hope only if every place has answered: what does not fit anywhere now may fit where nobody looked."""
    if market.problems:
        return Prospects(reason=f"{reason}; not known: {'; '.join(market.problems)}")
    return Prospects(reason=reason, hopeless=True)

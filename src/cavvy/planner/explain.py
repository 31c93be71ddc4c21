"""Explains why offers were rejected: which constraints the offers failed, which offers came nearest
and, if no offer is left, a summary in one sentence.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from cavvy.catalog.accelerators import split_instance
from cavvy.catalog.fit import Constraint, NearMiss, OfferMatches
from cavvy.catalog.needs import format_need
from cavvy.domain.offers import Offer, Purchase, Readiness
from cavvy.domain.tasks import ResourceSpec, SpotPolicy, TaskSpec
from cavvy.domain.units import HourlyRate, Money, format_memory, format_rate, format_usd
from cavvy.domain.values import Struct, replace
from cavvy.planner.placements import PlacementPlan, PlanLimit, ceil_cent

# For each constraint, the field of the task file that sets it.
FIELDS: dict[Constraint, str] = {
    Constraint.PURCHASE: "resources.spot",
    Constraint.ACCELERATOR: "resources.gpu",
    Constraint.COUNT: "resources.gpu",
    Constraint.ACCELERATOR_MEMORY: "resources.gpu",
    Constraint.INSTANCE: "resources.instance",
    Constraint.CPUS: "resources.cpu",
    Constraint.MEMORY: "resources.memory",
    Constraint.DISK: "resources.disk",
    Constraint.NETWORK: "resources.network",
    Constraint.PROVIDER: "resources.providers",
    Constraint.REGION: "resources.regions",
    Constraint.PRICE: "resources.max_price",
}
_TRIED = frozenset({*FIELDS, *PlanLimit})  # Any other reason is the name of a provider.


class Rejection(Struct, frozen=True, kw_only=True):
    """A reason for rejecting offers (a constraint, a limit or a provider), and the number of offers
    that were rejected for this reason. An offer counts only under the first reason that applies to
    it.
    """

    reason: str
    count: int
    field: str  # the field of the task file to change


class OfferMiss(Struct, frozen=True, kw_only=True):
    """An offer that fails only one constraint, or that meets all constraints but breaks a limit."""

    offer: Offer
    reason: str
    text: str  # why the offer fails
    change: str  # the change that would make the offer fit


class Explanation(Struct, frozen=True, kw_only=True):
    """The counts of all offers: `considered` equals `kept` plus the sum of all rejections."""

    considered: int
    kept: int
    rejections: tuple[Rejection, ...]  # in the order in which constraints are checked
    misses: tuple[OfferMiss, ...]  # the nearest first


def explain(
    matches: Iterable[OfferMatches],
    plan: PlacementPlan,
    *,
    refused: Sequence[Rejection] = (),
    readiness: Callable[[Offer], Readiness] = lambda _: Readiness.READY,
    limit: int = 5,
) -> Explanation:
    """Combine three lists of rejected offers: offers that do not fit the task's resources (in
    `matches`), offers that a provider refuses (`refused`), and offers that break a limit of the
    task (in `plan`).

    First come offers that fit the task's resources but exceed its budget, duration or deadline.
    Then come offers that do not fit the resources. Offers of providers that cannot run jobs come
    last.
    """
    answers = list(matches)
    counts: Counter[Constraint] = Counter()
    for answer in answers:
        counts.update(answer.rejected)
    rejections = [
        Rejection(reason=which, count=counts[which], field=FIELDS[which])
        for which in Constraint
        if counts[which]
    ]
    rejections += refused
    rejections += [
        Rejection(reason=which, count=count, field=f"limits.{which}")
        for which, count in plan.rejected.items()
    ]
    misses = sorted(
        [*_list_broken(plan), *map(_miss, _interleave(answers))],
        key=lambda miss: readiness(miss.offer) is Readiness.PRICE_ONLY,
    )
    return Explanation(
        considered=sum(answer.total for answer in answers),
        kept=plan.kept,
        rejections=tuple(rejections),
        misses=tuple(misses[:limit]),
    )


def _list_broken(plan: PlacementPlan) -> list[OfferMiss]:
    """Return the offers that break a limit, closest to the limit first. Offers above the budget are
    left out if a cheaper offer fits.
    """
    return [
        OfferMiss(offer=miss.offer, reason=miss.limit, text=miss.text, change=miss.change)
        for miss in sorted(plan.misses, key=lambda miss: (miss.doubtful, miss.broken, miss.excess))
        if not plan.kept or miss.limit is not PlanLimit.BUDGET
    ]


def say_no_offer(task: TaskSpec, found: Explanation) -> str:
    """Return one sentence, without a full stop, that states why there is no offer and what to
    change.
    """
    if not found.considered:
        return "No offer: there are no offers; `cavvy setup PROVIDER` sets one up"
    limits = [miss for miss in found.misses if miss.reason in set(PlanLimit)]
    prices = [miss for miss in found.misses if miss.reason == Constraint.PRICE]
    refused = [rejection for rejection in found.rejections if rejection.reason not in _TRIED]
    if refused and not limits:
        whom = " and ".join(rejection.reason for rejection in refused)
        fields = ", ".join(dict.fromkeys(rejection.field for rejection in refused))
        return f"No offer: some offers fit, but are refused by {whom}; change {fields}"
    if prices and not limits and task.resources.max_rate is not None:
        nearest = min(prices, key=lambda miss: (miss.offer.rate, miss.offer.key))
        rates = (
            f"{format_rate(nearest.offer.rate)}, but your limit is "
            f"{format_rate(task.resources.max_rate)}"
        )
        return f"No offer: the cheapest {wish(task.resources)} is {rates}; {nearest.change}"
    if misses_instance(task.resources, found):
        return say_no_instance(task.resources, ())
    if limits or found.misses:
        nearest = (limits or found.misses)[0]
        where = (
            f"{nearest.offer.instance_type} at {nearest.offer.provider} ({nearest.offer.region})"
        )
        return (
            f"No offer: the nearest match, {where} for {format_rate(nearest.offer.rate)}, "
            f"{nearest.text}; {nearest.change}"
        )
    return _far_from_all(found)


def ask_for_wholes(need: ResourceSpec) -> ResourceSpec | None:
    """Return the same need with whole GPUs instead of MIG instances, or None if it does not consist
    of instances only."""
    parts = [split_instance(each.name or "") for each in need.accelerators]
    families = list(dict.fromkeys(each[0] for each in parts if each is not None))
    if not families or None in parts:
        return None
    one = need.accelerators[0]
    return replace(need, accelerators=tuple(replace(one, name=f, part=1.0) for f in families))


def misses_instance(need: ResourceSpec, found: Explanation) -> bool:
    """Return whether the need is for MIG instances, and no offer that comes near has one."""
    names = {each.name for each in need.accelerators}
    near = any(each.offer.accelerator in names for each in found.misses)
    return ask_for_wholes(need) is not None and not near and not found.kept


def say_no_instance(need: ResourceSpec, wholes: Sequence[Offer]) -> str:
    """Return who has the needed MIG instances, and what a whole GPU costs: the first of `wholes`.
    Clouds rent whole GPUs."""
    price = ""
    if wholes:
        best = wholes[0]
        price = (
            f", or request a whole GPU: {best.accelerator} costs from {format_rate(best.rate)} "
            f"({best.instance_type} at {best.provider})"
        )
    return (
        f"No offer: no configured provider has an instance {wish(need)}. Hosts, Slurm and "
        "Kubernetes clusters have the MIG instances that were made on their GPUs, and clouds rent "
        f"whole GPUs; add such a host or cluster{price}"
    )


def replace_misses(found: Explanation, need: ResourceSpec, wholes: Sequence[Offer]) -> Explanation:
    """Return the explanation with whole GPUs as the nearest misses of a need for instances: other
    GPUs with as much memory as an instance are not near."""
    asked = wish(need)
    misses = [
        OfferMiss(
            offer=each,
            reason=Constraint.ACCELERATOR,
            text=f"is a whole {each.accelerator}, you asked for an instance {asked}",
            change=f"request {each.accelerator} in resources.gpu",
        )
        for each in wholes
    ]
    return replace(found, misses=tuple(misses))


def _far_from_all(found: Explanation) -> str:
    if len(found.rejections) == 1:
        only = found.rejections[0]
        all_fail = (
            "the only offer fails the requirement"
            if found.considered == 1
            else f"all {found.considered:,} offers fail the requirement"
        )
        return f"No offer: {all_fail} for {only.reason}; change {only.field}"
    most = max(found.rejections, key=lambda rejection: rejection.count)
    last = found.rejections[-1]
    every = f"each of {found.considered:,} offers misses several of the task's requirements"
    where = f"{most.count:,} of them fail the requirement for {most.reason} ({most.field})"
    if last is most:
        return f"No offer: {every}; {where}: change this requirement first"
    return (
        f"No offer: {every}; {where}, and the offers that meet most requirements fail the "
        f"requirement for {last.reason}: change {last.field} first"
    )


def wish(need: ResourceSpec) -> str:
    """Return a short description of the requested node, such as "H100:8 in eu or us" or "node with
    8 CPUs".
    """
    parts = []
    if need.instance:
        parts.append(need.instance)
    if need.accelerators:
        parts.append(" or ".join(format_need(one) for one in need.accelerators))
    if not parts:
        sizes = (
            ["1 CPU" if need.cpus_min == 1 else f"{need.cpus_min:g} CPUs"] if need.cpus_min else []
        )
        sizes += [format_memory(need.memory_min_mib)] if need.memory_min_mib else []
        sizes += (
            [f"{format_memory(need.memory_per_cpu_mib)} for each CPU"]
            if need.memory_per_cpu_mib
            else []
        )
        parts.append("node" + (f" with {' and '.join(sizes)}" if sizes else ""))
    if need.spot is SpotPolicy.ONLY:
        parts.append("on spot")
    if need.providers:
        parts.append(f"at {' or '.join(need.providers)}")
    if need.regions:
        parts.append(f"in {' or '.join(need.regions)}")
    return " ".join(parts)


def _interleave(answers: Sequence[OfferMatches]) -> list[NearMiss]:
    """Interleave the near misses of several catalogs: first the nearest miss of each catalog, then
    the second nearest miss of each catalog, and so on. In each of these groups, the misses are
    sorted by distance.
    """
    ordered: list[NearMiss] = []
    for index in range(max((len(answer.misses) for answer in answers), default=0)):
        found = [answer.misses[index] for answer in answers if index < len(answer.misses)]
        ordered += sorted(found, key=lambda miss: miss.distance)
    return ordered


def _miss(miss: NearMiss) -> OfferMiss:
    return OfferMiss(offer=miss.offer, reason=miss.constraint, text=miss.text, change=_change(miss))


def _change(miss: NearMiss) -> str:
    """Return the change to the task file that would make this offer fit."""
    offer, field = miss.offer, FIELDS[miss.constraint]
    if not _STATED.get(miss.constraint, bool)(offer):
        return f"leave out {field}"
    match miss.constraint:
        case Constraint.PURCHASE if offer.purchase is Purchase.RESERVED:
            return "buy this reserved capacity beforehand: a job cannot buy it"
        case Constraint.PURCHASE:
            return f"allow {offer.purchase} with {field}: auto"
        case Constraint.PRICE:
            return f"raise {field} to {format_usd(ceil_cent(_per_hour(offer.rate)))}"
        case Constraint.ACCELERATOR | Constraint.COUNT | Constraint.ACCELERATOR_MEMORY:
            each = (
                f" of {format_memory(offer.accelerator_memory_mib)}"
                if offer.accelerator_memory_mib
                else ""
            )
            return (
                "accept "
                f"{offer.accelerator or 'no accelerator'}:{offer.accelerators_text}{each} in "
                f"{field}"
            )
        case Constraint.INSTANCE:
            return f"accept {offer.instance_type} in {field}"
        case Constraint.CPUS:
            return f"accept {offer.vcpus:g} CPU{'s' if offer.vcpus != 1 else ''} in {field}"
        case Constraint.MEMORY:
            by_cpu = miss.per_cpu and offer.vcpus > 0
            memory = format_memory(
                int(offer.memory_mib / offer.vcpus) if by_cpu else offer.memory_mib
            )
            return f"accept {memory}{' for each CPU' if by_cpu else ''} in {field}"
        case Constraint.DISK | Constraint.NETWORK:
            return f"request less in {field}"
        case Constraint.PROVIDER:
            return f"allow {offer.provider} in {field}"
        case Constraint.REGION:
            return f"allow {offer.region} in {field}"


# Properties that some offers do not state. An offer without the property fits only if the task does
# not set the field.
_STATED: dict[Constraint, Callable[[Offer], object]] = {
    Constraint.CPUS: lambda offer: offer.vcpus,
    Constraint.MEMORY: lambda offer: offer.memory_mib,
    Constraint.NETWORK: lambda offer: offer.network_mbps,
}


def _per_hour(rate: HourlyRate) -> Money:
    return Money(rate.micros_per_hour)

"""The query interface of a catalog, which the snapshot's reader (in `store/`) and live offers
implement. Checks whether an offer fits one node of a requirement, and explains why not: constraints
are checked in the order of `Constraint`, and an offer is counted only for the first that it fails.
Queries of the catalog snapshot must give the same results as this module.

If an offer does not state a property (memory 0, network None), the offer fails every requirement
for this property. An offer without a disk size meets every disk requirement, because the size is
chosen at launch. On a shared host, a job gets only what it requests, so upper limits and exact
counts do not exclude the host.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from functools import lru_cache
from typing import Protocol

from cavvy.catalog.accelerators import is_match
from cavvy.catalog.needs import format_need
from cavvy.catalog.networks import find_fabric, find_unpublished, has_fabric
from cavvy.catalog.regions import is_region
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.tasks import DEFAULT_CPUS, AcceleratorNeed, NetworkNeed, ResourceSpec, SpotPolicy
from cavvy.domain.units import HourlyRate, format_memory, format_rate
from cavvy.domain.values import Struct, field


class Constraint(StrEnum):
    """The constraints that an offer can fail, in the order of the checks."""

    PURCHASE = "purchase"  # the purchase option: spot or on-demand
    ACCELERATOR = "accelerator"
    COUNT = "accelerator count"
    ACCELERATOR_MEMORY = "accelerator memory"
    INSTANCE = "instance type"
    CPUS = "cpus"
    MEMORY = "memory"
    DISK = "disk"
    NETWORK = "network"
    PROVIDER = "provider"
    REGION = "region"
    PRICE = "price"


class NearMiss(Struct, frozen=True, kw_only=True):
    """An offer that fails exactly one constraint, with the reason."""

    offer: Offer
    constraint: Constraint
    text: str  # e.g. "costs $19.92/h, your limit is $15.00/h"
    per_cpu: bool = False  # whether the task requires memory per CPU
    distance: float = 0.0  # how far the offer is from the constraint; 0 is the nearest


class OfferMatches(Struct, frozen=True, kw_only=True):
    """The offers that fit, cheapest first, and the counts of rejected offers.

    `total` is the number of offers that were considered: matched + sum(rejected.values()) == total.
    """

    offers: Sequence[Offer]
    matched: int
    total: int
    rejected: Mapping[Constraint, int] = field(default_factory=dict)
    misses: Sequence[NearMiss] = ()


class OfferLot(Struct, frozen=True, kw_only=True):
    """Offers of the catalog that differ only in location and price: the offers of one machine type
    and one purchase option.
    """

    number: int  # the number of the machine type in the snapshot
    part: int  # the number of the group of locations, if the locations are grouped
    # an offer with the lowest rate of the lot, without the properties that the rank does not need
    sample: Offer
    most: int  # the highest rate, in micro-US-dollars per hour
    count: int


class Catalog(Protocol):
    """A source of offers."""

    def match(
        self, need: ResourceSpec, *, limit: int | None = None, misses: int = 5
    ) -> OfferMatches:
        """Find the offers that fit one node of `need`. The result has at most `limit` offers,
        cheapest first, or all offers if `limit` is None, and at most `misses` near misses.
        """


PURCHASES: dict[SpotPolicy, tuple[Purchase, ...]] = {
    SpotPolicy.NEVER: (Purchase.ON_DEMAND,),
    SpotPolicy.ONLY: (Purchase.SPOT,),
    SpotPolicy.AUTO: (Purchase.ON_DEMAND, Purchase.SPOT),
}
# Distances measure how far an offer is from a requirement: 1 means twice the price or half the
# size. ELSEWHERE is the distance of another region, provider or purchase option.
ELSEWHERE = 1.0
# the distance of another accelerator, which is usually larger than that of another count
OTHER_ACCELERATOR = 20.0
_ROUNDED = 0.99  # the tolerance with which a request for 0.167 accepts 1/6
UNKNOWN = 1.5  # the distance of an offer that does not state the property


def first_failing(offer: Offer, need: ResourceSpec) -> Constraint | None:
    """Return the first constraint that the offer fails, in the order of `Constraint`, or None if
    the offer fits.
    """
    return next(
        (constraint for constraint in Constraint if not meets(offer, need, constraint)), None
    )


def match_offers(
    offers: Iterable[Offer], need: ResourceSpec, *, limit: int | None = None, misses: int = 5
) -> OfferMatches:
    """Match offers in memory. The result equals the result of `Catalog.match`."""
    fitting: list[Offer] = []
    failing: list[Offer] = []
    rejected: Counter[Constraint] = Counter()
    for offer in offers:
        failed = first_failing(offer, need)
        if failed is None:
            fitting.append(offer)
        else:
            rejected[failed] += 1
            failing.append(offer)
    return OfferMatches(
        offers=tuple(sorted(fitting, key=order)[:limit]),
        matched=len(fitting),
        total=len(fitting) + len(failing),
        rejected={each: rejected[each] for each in Constraint if each in rejected},
        misses=tuple(_nearest(failing, need, misses)),
    )


def _nearest(offers: Iterable[Offer], need: ResourceSpec, count: int) -> list[NearMiss]:
    """Return the near misses, nearest first. Of all offers with the same constraint, provider and
    instance type, only the nearest offer is kept.
    """
    near: dict[tuple[Constraint, str, str], tuple[float, Offer]] = {}
    for offer in offers:
        missed = near_miss(offer, need)
        if missed is not None:
            constraint, distance = missed
            key = (constraint, offer.provider, offer.instance_type)
            if key not in near or (distance, order(offer)) < (near[key][0], order(near[key][1])):
                near[key] = (distance, offer)
    ranked = sorted(near.items(), key=lambda item: (item[1][0], order(item[1][1])))
    return [make_miss(offer, need, key[0]) for key, (_, offer) in ranked[:count]]


def order(offer: Offer) -> tuple[int, str, str, str, str, int, str]:
    """Return the sort key of an offer: by price, then by names. The names make the order
    independent of the order in which the offers were read.
    """
    return (
        offer.rate.micros_per_hour,
        offer.provider,
        offer.region,
        offer.zone or "",
        offer.instance_type,
        offer.accelerator_count,
        offer.purchase,
    )


def near_miss(offer: Offer, need: ResourceSpec) -> tuple[Constraint, float] | None:
    """If the offer fails exactly one constraint, return this constraint and the distance; otherwise
    return None.

    If accelerators are required, a machine without accelerators is never a near miss. If an
    instance type is required, a machine of another type is never a near miss.
    """
    if offer.purchase is Purchase.RESERVED:
        return None
    missed: tuple[Constraint, float] | None = None
    if need.accelerators:
        stage, missed = _fit_accelerators(offer, need)
        if stage is not None and missed is None:
            return None
    for constraint in Constraint:
        if constraint in _ACCELERATOR or meets(offer, need, constraint):
            continue
        if missed is not None or constraint is Constraint.INSTANCE:
            return None
        missed = constraint, _distance(offer, need, constraint)
    return missed


def make_miss(offer: Offer, need: ResourceSpec, constraint: Constraint) -> NearMiss:
    """Describe an offer that fails only this constraint."""
    missed = near_miss(offer, need)
    return NearMiss(
        offer=offer,
        constraint=constraint,
        text=explain(offer, need, constraint),
        per_cpu=need.memory_per_cpu_mib is not None,
        distance=0.0 if missed is None else missed[1],
    )


def explain(offer: Offer, need: ResourceSpec, constraint: Constraint) -> str:
    """Explain why an offer fails a constraint, with the offer's value and the required value:
    "costs $19.92/h, your limit is $15.00/h".
    """
    match constraint:
        case Constraint.PURCHASE:
            wanted = " or ".join(PURCHASES[need.spot])
            return f"is {offer.purchase}, you asked for {wanted} (spot: {need.spot})"
        case Constraint.ACCELERATOR | Constraint.COUNT | Constraint.ACCELERATOR_MEMORY:
            asked = " or ".join(format_need(item) for item in need.accelerators)
            return f"has {_accelerators(offer)}, you asked for {asked}"
        case Constraint.INSTANCE:
            return f"is {offer.instance_type}, you asked for {need.instance}"
        case Constraint.CPUS:
            noun = "CPU" if offer.vcpus == 1 else "CPUs"
            return _gap(noun, _number(offer.vcpus), _range(need.cpus_min, need.cpus_max, _number))
        case Constraint.MEMORY:
            return _memory_gap(offer, need)
        case Constraint.DISK:
            return f"has {offer.disk_gib} GiB of disk, you asked for {need.disk_gib} GiB"
        case Constraint.NETWORK:
            return _network_gap(offer, need.network or NetworkNeed())
        case Constraint.PROVIDER:
            return f"is at {offer.provider}, you asked for {', '.join(need.providers)}"
        case Constraint.REGION:
            return f"is in {offer.zone or offer.region}, you asked for {', '.join(need.regions)}"
        case Constraint.PRICE:
            assert need.max_rate is not None
            return (
                f"costs {_price(offer.rate, need.max_rate)}, your limit is "
                f"{_price(need.max_rate, offer.rate)}"
            )


_ACCELERATOR = (Constraint.ACCELERATOR, Constraint.COUNT, Constraint.ACCELERATOR_MEMORY)


@lru_cache(maxsize=4096)
def accelerator_fit(
    name: str | None,
    count: int,
    memory_mib: int,
    needs: tuple[AcceleratorNeed, ...],
    shared: bool = False,
    part: float = 1.0,
) -> tuple[Constraint | None, tuple[Constraint, float] | None]:
    """Check the three accelerator constraints. Return the first constraint that fails, or None. The
    second result is for an alternative that fails only one constraint: this constraint, and how far
    the offer is from meeting it.

    If `needs` has several alternatives, the constraints are checked in order. A constraint fails if
    it excludes all alternatives that the constraints before it have left.
    """
    if name is None or not count:
        return Constraint.ACCELERATOR, None
    stage = 0
    near: tuple[float, int] | None = None
    for need in needs:
        least, most = need.count_min, need.count_max or need.count_min
        size = (need.memory_min_mib or 0, need.memory_max_mib or _NO_END)
        fails = (
            not is_match(name, need.name),
            count < least or part < _ROUNDED * need.part or (count > most and not shared),
            not size[0] <= memory_mib <= size[1],
        )
        if not any(fails):
            return None, None
        stage = max(stage, fails.index(True))
        if sum(fails) == 1:
            which = fails.index(True)
            gap = (
                OTHER_ACCELERATOR,
                max(
                    relative_gap(count, least, most), relative_gap(part, _ROUNDED * need.part, None)
                ),
                relative_gap(memory_mib, *size),
            )[which]
            near = min(near or (gap, which), (gap, which))
    return _ACCELERATOR[stage], None if near is None else (_ACCELERATOR[near[1]], near[0])


_NO_END = 1 << 60


def relative_gap(value: float, low: float | None, high: float | None) -> float:
    """Return how far a value is outside its limits, relative to the smaller of the value and the
    limit. A value of 0 means that the offer does not state the value.
    """
    if not value:
        return UNKNOWN
    if low is not None and value < low:
        return low / value - 1
    return value / high - 1 if high else 0.0


def names_instance(need: ResourceSpec, offer: Offer) -> bool:
    """Return whether the machine type of the offer is required, in any case."""
    return need.instance is not None and offer.instance_type.lower() == need.instance.lower()


def meets(offer: Offer, need: ResourceSpec, constraint: Constraint) -> bool:
    """Return whether the offer meets this constraint."""
    if offer.owned:
        need = need.stated()
    match constraint:
        case Constraint.PURCHASE:
            return offer.purchase in PURCHASES[need.spot]
        case Constraint.ACCELERATOR | Constraint.COUNT | Constraint.ACCELERATOR_MEMORY:
            return _meets_accelerators(offer, need, constraint)
        case Constraint.INSTANCE:
            return need.instance is None or names_instance(need, offer)
        case Constraint.CPUS:
            return _within(offer.vcpus, need.cpus_min, need.cpus_max, offer.shared)
        case Constraint.MEMORY:
            return _within(*_memory(offer, need), offer.shared)
        case Constraint.DISK:
            return (
                need.disk_gib is None or offer.disk_gib is None or offer.disk_gib >= need.disk_gib
            )
        case Constraint.NETWORK:
            return need.network is None or _meets_network(offer, need.network)
        case Constraint.PROVIDER:
            return not need.providers or offer.is_of(need.providers)
        case Constraint.REGION:
            return _meets_region(offer, need)
        case Constraint.PRICE:
            return need.max_rate is None or offer.rate <= need.max_rate


def _meets_accelerators(offer: Offer, need: ResourceSpec, constraint: Constraint) -> bool:
    if not need.accelerators:
        return True
    return _fit_accelerators(offer, need)[0] is not constraint


def _fit_accelerators(
    offer: Offer, need: ResourceSpec
) -> tuple[Constraint | None, tuple[Constraint, float] | None]:
    return accelerator_fit(
        offer.accelerator,
        offer.accelerator_count,
        offer.accelerator_memory_mib,
        need.accelerators,
        offer.shared,
        offer.accelerator_part,
    )


def memory_bounds(
    need: ResourceSpec, memory_mib: int, cpus: float
) -> tuple[int, int | None, int | None]:
    """Return a node's memory, and the required minimum and maximum. If the memory is required per
    CPU and the node's number of CPUs is unknown, the result has 0 as the node's memory, so the node
    does not fit.
    """
    if need.memory_per_cpu_mib is None:
        return memory_mib, need.memory_min_mib, need.memory_max_mib
    return memory_mib if cpus else 0, need.least_memory_mib(cpus), need.memory_max_mib


def _memory(offer: Offer, need: ResourceSpec) -> tuple[int, int | None, int | None]:
    """Return the result of `memory_bounds` for an offer. For a shared host, only the CPUs that the
    job requests are counted.
    """
    return memory_bounds(
        need, offer.memory_mib, need.cpus_min or DEFAULT_CPUS if offer.shared else offer.vcpus
    )


def _memory_gap(offer: Offer, need: ResourceSpec) -> str:
    fixed = need.memory_min_mib is not None or need.memory_max_mib is not None
    asked = [_range(need.memory_min_mib, need.memory_max_mib, format_memory)] if fixed else []
    if need.memory_per_cpu_mib is not None:
        asked.append(f"{format_memory(need.memory_per_cpu_mib)} for each CPU")
        if offer.memory_mib and not offer.vcpus:
            return _gap("CPUs", "", asked[-1])
    has = format_memory(offer.memory_mib) if offer.memory_mib else ""
    counted = (
        f" for {_number(offer.vcpus)} CPUs" if need.memory_per_cpu_mib is not None and has else ""
    )
    return _gap(f"memory{counted}", has, " and ".join(asked))


def _meets_network(offer: Offer, need: NetworkNeed) -> bool:
    if need.fabric is not None and not has_fabric(offer.provider, offer.instance_type, need.fabric):
        return False
    return need.min_mbps is None or (offer.network_mbps or 0) >= need.min_mbps


def _network_gap(offer: Offer, need: NetworkNeed) -> str:
    asked = [f"at least {_gbits(need.min_mbps)}"] if need.min_mbps is not None else []
    has = [_gbits(offer.network_mbps)] if offer.network_mbps else []
    if need.fabric is not None:
        found = find_fabric(offer.provider, offer.instance_type)
        if found is None:
            return f"has no known RDMA network, you asked for {need.fabric}"
        has, asked = [*has, found], [*asked, need.fabric]
    unpublished = find_unpublished(offer.provider, offer.instance_type)
    if offer.network_mbps is None and unpublished is not None:
        return (
            f"has a network whose speed {offer.provider} does not publish, but you asked for "
            f"{' '.join(asked)}"
        )
    return _gap("network", " ".join(has), " ".join(asked))


def _within(value: float, low: float | None, high: float | None, shared: bool) -> bool:
    if low is None and high is None:
        return True
    return bool(value) and value >= (low or 0) and (shared or high is None or value <= high)


def _distance(offer: Offer, need: ResourceSpec, constraint: Constraint) -> float:
    match constraint:
        case Constraint.CPUS:
            return relative_gap(offer.vcpus, need.cpus_min, need.cpus_max)
        case Constraint.MEMORY:
            return relative_gap(*_memory(offer, need))
        case Constraint.DISK:
            return relative_gap(offer.disk_gib or 0, need.disk_gib, None)
        case Constraint.NETWORK if need.network and not need.network.fabric:
            return relative_gap(offer.network_mbps or 0, need.network.min_mbps, None)
        case Constraint.PRICE:
            assert need.max_rate is not None
            return relative_gap(
                offer.rate.micros_per_hour, None, need.max_rate.micros_per_hour or 1
            )
        case _:
            return ELSEWHERE


def _accelerators(offer: Offer) -> str:
    memory = (
        f" of {format_memory(offer.accelerator_memory_mib)}" if offer.accelerator_memory_mib else ""
    )
    return (
        f"{offer.accelerators_text} {offer.accelerator}{memory}"
        if offer.accelerator
        else "no accelerator"
    )


def _gap(noun: str, has: str, asked: str) -> str:
    return (
        f"has {has} {noun}, you asked for {asked}"
        if has
        else f"does not state its {noun}, you asked for {asked}"
    )


def _price(rate: HourlyRate, other: HourlyRate) -> str:
    """Format a price as text. If `rate` and `other` would look equal, more digits are shown."""
    return format_rate(rate) if format_rate(rate) != format_rate(other) else f"${rate.usd:,.6f}/h"


def _range(low: float | None, high: float | None, show: Callable[..., str]) -> str:
    if low is not None and high is not None:
        return show(low) if low == high else f"{show(low)} to {show(high)}"
    return f"at least {show(low)}" if low is not None else f"at most {show(high or 0)}"


def _number(value: float) -> str:
    return f"{value:g}" if value else ""


def _gbits(mbps: int) -> str:
    return f"{mbps / 1000:g} Gbit/s"


def _meets_region(offer: Offer, need: ResourceSpec) -> bool:
    wanted = need.regions
    return not wanted or any(
        is_region(each, offer.provider, offer.region, offer.zone) for each in wanted
    )

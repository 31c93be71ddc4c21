"""Computes what a finished run would have cost on other offers. If the task states its work, the
measured time is multiplied by the ratio of the estimated times on the two offers. `costs.metering`
computes the real cost of a run.
"""

from collections.abc import Iterable, Mapping
from datetime import timedelta

from cavvy.catalog.tables import find_architecture
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.units import Money, format_duration
from cavvy.domain.values import Struct
from cavvy.planner.work import MACHINE_START, estimate, shape_of

# Memory for the operating system and the agent, in addition to the memory for the work. The value
# is about the smallest size that the images of cloud providers require.
SYSTEM_MIB = 1024


class CounterfactualCost(Struct, frozen=True, kw_only=True):
    """The cost that a run would have had on another offer. `basis` is a text that states which
    running time was assumed.
    """

    offer: Offer
    node_time: timedelta  # billed time of each node
    cost: Money
    basis: str


def compare_counterfactuals(
    task: TaskSpec, ran: timedelta, here: Offer, offers: Iterable[Offer], *, count: int = 3
) -> list[CounterfactualCost]:
    """Return the `count` offers on which a past run would have cost least. This run took the time
    `ran` on the offer `here`.

    If the task's stated work gives an estimated time for both offers, the measured time is
    multiplied by the ratio of the two estimates. An error in the stated work, such as a wrong
    efficiency, changes both estimates by the same factor, so it does not change their ratio. If an
    estimated time is missing, the run is assumed to take the same time on both offers. Each result
    states whether its time was multiplied by this ratio or is the measured time itself. Offers
    whose CPUs have a different architecture from the run's CPUs are left out.
    """
    own = find_architecture(here)
    at_hand = [offer for offer in offers if find_architecture(offer) == own]
    expected_here = estimate(task, here).run_time
    ratios: dict[tuple[object, ...], float | None] = {}
    lengths: dict[str, timedelta] = {}
    for offer in at_hand if expected_here else ():
        shape = shape_of(offer, task)
        if shape not in ratios:
            there = estimate(task, offer).run_time
            ratios[shape] = None if there is None or not expected_here else there / expected_here
        ratio = ratios[shape]
        if ratio is not None and ratio != 1:
            lengths[offer.key] = ran * ratio
    return price_counterfactuals(
        at_hand, nodes=task.nodes, ran=ran, start=MACHINE_START, lengths=lengths, count=count
    )


def price_counterfactuals(
    offers: Iterable[Offer],
    *,
    nodes: int,
    ran: timedelta,
    start: timedelta = timedelta(0),
    lengths: Mapping[str, timedelta] | None = None,
    count: int = 3,
) -> list[CounterfactualCost]:
    """Return the `count` rentable offers in `offers` on which the run would have been cheapest if
    nothing had interrupted the run.

    `ran` is the measured running time. If the task states its work, `lengths` gives the estimated
    running time by offer key; for offers that are not in `lengths`, the measured time is assumed.
    `basis` states whether the estimated or the measured time was used. `start` is the billed time
    before the work begins. For each combination of provider, instance type and purchase option, the
    result contains only the cheapest offer of all regions and zones.
    """
    cheapest: dict[tuple[str, str, str], CounterfactualCost] = {}
    for offer in offers:
        if offer.shared or offer.rate.micros_per_hour <= 0:
            continue
        scaled = (lengths or {}).get(offer.key)
        priced = _price(offer, nodes, ran if scaled is None else scaled, start, scaled is not None)
        kind = (offer.provider, offer.instance_type, str(offer.purchase))
        best = cheapest.get(kind)
        if best is None or _by_cost(priced) < _by_cost(best):
            cheapest[kind] = priced
    return sorted(cheapest.values(), key=_by_cost)[:count]


def _price(
    offer: Offer, nodes: int, length: timedelta, start: timedelta, scaled: bool
) -> CounterfactualCost:
    start = start if offer.boot is None else offer.boot
    billed = max(start + length, offer.minimum_charge)
    basis = "running time estimated from the stated work" if scaled else "same running time assumed"
    if billed > start + length:
        basis += f", minimum charge of {format_duration(offer.minimum_charge)}"
    elif start:
        basis += f", {format_duration(start)} to start"
    return CounterfactualCost(
        offer=offer, node_time=billed, cost=offer.rate.times(nodes).over(billed), basis=basis
    )


def _by_cost(priced: CounterfactualCost) -> tuple[Money, str]:
    return priced.cost, priced.offer.key

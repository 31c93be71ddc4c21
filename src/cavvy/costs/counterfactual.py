"""Computes how much a finished run would have cost on other offers. `metering` computes the real
cost of a run.
"""

from collections.abc import Iterable, Mapping
from datetime import timedelta

from cavvy.domain.offers import Offer
from cavvy.domain.units import Money, format_duration
from cavvy.domain.values import Struct


class CounterfactualCost(Struct, frozen=True, kw_only=True):
    """The cost that a run would have had on another offer. `basis` is a text that states which
    running time was assumed.
    """

    offer: Offer
    node_time: timedelta  # billed time of each node
    cost: Money
    basis: str


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

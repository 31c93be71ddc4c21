"""The bill of a job: what each attempt cost, the total, and what the same run would have cost at other places."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from remuda.costs.metering import total
from remuda.domain.events import Charge, ChargeKind
from remuda.domain.jobs import Attempt, Outcome
from remuda.domain.offers import Offer
from remuda.domain.units import HourlyRate, Money, format_duration


@dataclass(frozen=True, slots=True, kw_only=True)
class BillLine:
    """One attempt's nodes at one price, or what its minimum charge added."""

    attempt: int
    place: str  # offer key
    kind: ChargeKind
    nodes: int  # that were billed at this price
    node_time: timedelta  # summed over nodes
    rate: HourlyRate  # of one node
    amount: Money
    outcome: Outcome | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """Lines in the order of the attempts; `total` is the sum of all charges, not of anything rounded for display."""

    lines: tuple[BillLine, ...]
    total: Money


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """What the same run would have cost on another offer. `basis` says which running time was assumed."""

    offer: Offer
    node_time: timedelta  # that each node would have been billed
    cost: Money
    basis: str


def make_bill(attempts: Iterable[Attempt], charges: Iterable[Charge]) -> Bill:
    """Sum charges by attempt, kind and price. A charge whose attempt is not among `attempts` is billed all the same."""
    known = {attempt.id: attempt for attempt in attempts}
    groups: dict[tuple[int, str, ChargeKind, HourlyRate], list[Charge]] = {}
    ordered = sorted(charges, key=lambda charge: (charge.since, charge.rank))
    for charge in ordered:
        attempt = known.get(charge.attempt_id)
        number = attempt.number if attempt else _number(charge.attempt_id)
        groups.setdefault((number, charge.attempt_id, charge.kind, charge.rate), []).append(charge)
    by_attempt = sorted(groups.items(), key=lambda item: item[0][0])
    lines = (_line(known.get(key[1]), key[0], key[2], group) for key, group in by_attempt)
    return Bill(lines=tuple(lines), total=total(ordered))


def price_elsewhere(
    offers: Iterable[Offer],
    *,
    nodes: int,
    ran: timedelta,
    start: timedelta = timedelta(0),
    lengths: Mapping[str, timedelta] | None = None,
    count: int = 3,
) -> list[Elsewhere]:
    """The cheapest `count` among `offers` that are for rent, had the run been there, undisturbed.

    `ran` is the measured running time. `lengths` gives the running time on an offer, by its key, where the task's
    stated work allows to scale it; else the same time is assumed, which `basis` says. `start` is billed before the
    work begins. One offer per provider, instance type and way of purchase: three zones of one machine tell nothing.
    """
    cheapest: dict[tuple[str, str, str], Elsewhere] = {}
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


def _price(offer: Offer, nodes: int, length: timedelta, start: timedelta, scaled: bool) -> Elsewhere:
    billed = max(start + length, offer.minimum_charge)
    basis = "running time scaled by the stated work" if scaled else "same running time assumed"
    if billed > start + length:
        basis += f", minimum charge of {format_duration(offer.minimum_charge)}"
    elif start:
        basis += f", {format_duration(start)} to start"
    return Elsewhere(offer=offer, node_time=billed, cost=offer.rate.times(nodes).over(billed), basis=basis)


def _by_cost(priced: Elsewhere) -> tuple[Money, str]:
    return priced.cost, priced.offer.key


def _line(attempt: Attempt | None, number: int, kind: ChargeKind, group: Sequence[Charge]) -> BillLine:
    return BillLine(
        attempt=number,
        place=attempt.offer.key if attempt else "",
        kind=kind,
        nodes=len({charge.rank for charge in group}),
        node_time=sum((charge.until - charge.since for charge in group), timedelta(0)),
        rate=group[0].rate,
        amount=total(group),
        outcome=attempt.outcome if attempt else None,
    )


def _number(attempt_id: str) -> int:
    _, _, number = attempt_id.rpartition("-")
    return int(number) if number.isdigit() else 0

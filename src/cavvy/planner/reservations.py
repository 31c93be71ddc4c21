"""Finds the commitments that would have saved money, from the number of machines used in each hour.

The committed machines are numbered from 1. The machine with the number k counts as used in each
hour in which at least k machines ran. A commitment for the k-th machine saves money if the hours in
which this machine is used would cost more on demand than all hours of the period cost at the
committed rate. Commitments are added one machine at a time, until another commitment would not save
money.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from cavvy.domain.offers import Offer
from cavvy.domain.units import HourlyRate, Money
from cavvy.domain.values import Struct

_HOUR = timedelta(hours=1)
_MONTH = timedelta(days=30)


class ReservableType(NamedTuple):
    """The kind of machine that a commitment applies to."""

    provider: str
    region: str
    instance_type: str


_MOST_MACHINES = 10_000  # that one piece of advice commits to


class UsedMachine(Struct, frozen=True, kw_only=True):
    """The time for which one machine was charged at the on-demand price."""

    kind: ReservableType
    since: datetime
    until: datetime
    rate: HourlyRate


class ReservationAdvice(Struct, frozen=True, kw_only=True):
    """A commitment that would have saved money in the period. `used` is the share of the committed
    hours that would have been used; `monthly` is the savings per 30 days.
    """

    offer: Offer
    machines: int
    used: float
    on_demand: HourlyRate  # the mean rate that was paid on demand
    monthly: Money


def advise_reservations(
    used: Iterable[UsedMachine], offers: Sequence[Offer], since: datetime, until: datetime
) -> list[ReservationAdvice]:
    """For each type of machine, compute the commitment that would have saved the most money. Return
    the commitments that were found, the largest savings first.
    """
    hours = max(1, round((until - since) / _HOUR))
    running: dict[ReservableType, list[float]] = {}
    paid: dict[ReservableType, tuple[float, float]] = {}  # hours and micro-dollars
    for machine in used:
        levels = running.setdefault(machine.kind, [0.0] * hours)
        length = _add(levels, machine, since)
        before = paid.get(machine.kind, (0.0, 0.0))
        cost = length * machine.rate.micros_per_hour
        paid[machine.kind] = (before[0] + length, before[1] + cost)
    found = []
    for offer in offers:
        kind = ReservableType(offer.provider, offer.region, offer.instance_type)
        if not offer.term_months or kind not in running or not paid[kind][0]:
            continue
        rate = paid[kind][1] / paid[kind][0]
        advice = _commit(offer, running[kind], rate)
        if advice is not None:
            found.append(advice)
    return sorted(_best(found).values(), key=lambda each: (-each.monthly.micros, each.offer.key))


def _best(found: Iterable[ReservationAdvice]) -> Mapping[tuple[str, str, str], ReservationAdvice]:
    best: dict[tuple[str, str, str], ReservationAdvice] = {}
    for each in found:
        key = each.offer.provider, each.offer.region, each.offer.instance_type
        if key not in best or each.monthly > best[key].monthly:
            best[key] = each
    return best


def _add(levels: list[float], machine: UsedMachine, since: datetime) -> float:
    """For each hour of the period, add to `levels` the part of the hour during which the machine
    was used. Returns the sum of these parts in hours.
    """
    total = 0.0
    begin = max(0.0, (machine.since - since) / _HOUR)
    end = min(float(len(levels)), (machine.until - since) / _HOUR)
    for hour in range(int(begin), len(levels)):
        part = min(end, hour + 1) - max(begin, hour)
        if part <= 0:
            break
        levels[hour] += part
        total += part
    return total


def _commit(offer: Offer, levels: Sequence[float], rate: float) -> ReservationAdvice | None:
    machines, saved, used = 0, 0.0, 0.0
    committed = offer.rate.micros_per_hour * len(levels)
    most = min(_MOST_MACHINES, max(levels))
    while machines < most:
        hours = sum(min(1.0, max(0.0, level - machines)) for level in levels)
        if hours * rate <= committed:
            break
        machines, saved, used = machines + 1, saved + hours * rate - committed, used + hours
    if not machines:
        return None
    return ReservationAdvice(
        offer=offer,
        machines=machines,
        used=used / (machines * len(levels)),
        on_demand=HourlyRate(round(rate)),
        monthly=Money(round(saved * (_MONTH / _HOUR) / len(levels))),
    )

"""Computes the cost of extras: the disks and public addresses that providers bill in addition to
machines.

A price per month is divided by the hours of that month, as AWS does
(https://aws.amazon.com/ebs/pricing/). Therefore the charges for a disk are split at the beginning
of each month in UTC.
"""

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

from cavvy.costs.metering import Rates, bill
from cavvy.domain.events import Charge, ChargeKind
from cavvy.domain.gangs import NodeExtra, NodeSeen, list_extras
from cavvy.domain.jobs import Attempt
from cavvy.domain.offers import ExtraPrice, Offer
from cavvy.domain.postings import list_months, month_of, next_month
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import replace

_HOUR = timedelta(hours=1)
_USUAL_MONTH_H = 730  # hours of an average month


def bill_extras(
    attempt: Attempt,
    node: NodeSeen,
    *,
    since: datetime,
    until: datetime,
    earlier: Iterable[Charge] = (),
    final: bool,
) -> list[Charge]:
    """Return the charges for the node's extras in [`since`, `until`), at the prices of the
    attempt's offer. An extra that has no price is not charged.

    If the provider no longer reports the node's extras, the rates of the `earlier` charges of the
    same rank are used. If `final` is set, the node ended at `until`, and each extra is charged for
    at least its minimum time.
    """
    charges: list[Charge] = []
    for kind in ChargeKind:
        if not kind.is_extra:
            continue
        priced = _find_prices(attempt.offer, node.extras, kind)
        end = until
        if final and node.started_at is not None:
            least = max((price.minimum for price, _ in priced), default=timedelta(0))
            end = max(until, node.started_at + least)
        rates = _list_rates(kind, priced, since, end) or [
            (charge.since, charge.rate)
            for charge in earlier
            if (charge.attempt_id, charge.rank, charge.kind) == (attempt.id, node.rank, kind)
        ]
        if not rates:
            continue
        charges += [
            replace(charge, kind=kind)
            for charge in bill(
                attempt=attempt, rank=node.rank, started=since, until=end, rates=rates, final=False
            )
        ]
    return charges


def rate_extras(offer: Offer, extras: Sequence[NodeExtra], now: datetime) -> HourlyRate:
    """Return the hourly rate of a node's extras at the time `now`."""
    rates = [
        _list_rates(kind, _find_prices(offer, extras, kind), now, now)
        for kind in ChargeKind
        if kind.is_extra
    ]
    return HourlyRate(sum(each[0][1].micros_per_hour for each in rates if each))


def expect_extras(
    offer: Offer, disk_gib: int | None = None, disk_type: str | None = None
) -> HourlyRate:
    """Return the expected hourly rate of the extras of one node of the offer, in a month of average
    length; see `list_extras`.
    """
    if not offer.extras:
        return HourlyRate()
    extras, micros = list_extras(offer, disk_gib, disk_type), 0.0
    for kind in {each.kind for each in extras}:
        hours = _USUAL_MONTH_H if kind is ChargeKind.DISK else 1
        priced = _find_prices(offer, extras, kind)
        micros += sum(price.price.micros * units for price, units in priced) / hours
    return HourlyRate(round(micros))


def _find_prices(
    offer: Offer, extras: Sequence[NodeExtra], kind: ChargeKind
) -> list[tuple[ExtraPrice, int]]:
    """Return the prices of the extras of one kind. Each price is paired with the number of times
    that the price is billed.
    """
    found = []
    for extra in extras:
        prices = [
            each
            for each in offer.extras
            if (each.kind, each.name) == (kind, extra.name)
            and (not each.up_to_gib or each.up_to_gib >= extra.units)
        ]
        if extra.kind is kind and prices and extra.units:
            price = min(prices, key=lambda each: each.up_to_gib)
            found.append((price, 1 if price.up_to_gib else extra.units))
    return found


def _list_rates(
    kind: ChargeKind, priced: Sequence[tuple[ExtraPrice, int]], since: datetime, until: datetime
) -> Rates:
    """Return the hourly rates from `since` to `until`, each with the time from which it applies."""
    micros = sum(price.price.micros * units for price, units in priced)
    if not priced:
        return ()
    if kind is not ChargeKind.DISK:
        return [(since, HourlyRate(micros))]
    return list_monthly_rates(micros, since, until)


def list_monthly_rates(micros: int, since: datetime, until: datetime) -> Rates:
    """Convert a price in micro-dollars per month to one hourly rate for each month in UTC, because
    months have different numbers of hours. Each rate is returned with the time from which the rate
    applies.
    """
    rates = []
    for at in (since, *list_months(since, until)):
        hours = (next_month(at) - month_of(at)) // _HOUR
        rates.append((at, HourlyRate((2 * micros + hours) // (2 * hours))))
    return rates

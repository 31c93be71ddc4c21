"""Computes the cost of a node's lifetime, split into periods. Every microsecond of the lifetime is
charged once, at the price that applied at that time.

`control` calls `bill` after polls of a gang. After each call of `bill`, the store replaces all
charges of the node's rank.
"""

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from itertools import pairwise

from cavvy.domain.events import Charge, ChargeKind
from cavvy.domain.jobs import Attempt
from cavvy.domain.units import HourlyRate, Money

Rates = Sequence[tuple[datetime, HourlyRate]]
_NOTHING = timedelta(0)


def bill(
    *,
    attempt: Attempt,
    rank: int,
    started: datetime,
    until: datetime,
    rates: Rates = (),
    minimum: timedelta | None = None,
    final: bool,
) -> list[Charge]:
    """Charge the node of `rank` for its lifetime so far, [`started`, `until`).

    `rates` are the prices of one node, each with the time from which it applies, as in
    `GangSeen.rates`. If the first price takes effect after `started`, the time in between is also
    charged at this price. If `rates` is (), the offer's rate applies. `minimum` is the shortest
    time that is billed, even if the node ends earlier; if it is None, the offer's minimum applies.
    If `final` is set, the node ended at `until`, and the part of `minimum` after `until` is charged
    separately.

    The charges cover half-open periods without gaps. A new period begins where the price changes.
    Each charge is rounded once. A later call can pass a greater `until` and additional `rates` that
    begin after the last period. This call extends the last period and appends new periods; earlier
    periods do not change.
    """
    prices = list_prices(rates or ((started, attempt.offer.rate),), started)
    charges = [
        charge_node(attempt, rank, since, end, rate)
        for since, end, rate in list_stretches(prices, until)
    ]
    floor = started + (attempt.offer.minimum_charge if minimum is None else minimum)
    ended = max(started, until)
    if final and floor > ended:
        charges.append(
            charge_node(attempt, rank, ended, floor, _rate_at(prices, ended), ChargeKind.MINIMUM)
        )
    return charges


def total(charges: Iterable[Charge]) -> Money:
    """Return the sum of all charges."""
    return Money(sum(charge.amount.micros for charge in charges))


def list_prices(rates: Rates, started: datetime) -> list[tuple[datetime, HourlyRate]]:
    """Return the prices from `started` on, in chronological order. If two entries have the same
    time, the later entry is used.

    An entry that repeats the previous price is omitted, because a provider may report its price at
    every poll.
    """
    ordered = sorted(rates, key=lambda entry: entry[0])
    first = [rate for since, rate in ordered if since <= started]
    prices = [(started, first[-1] if first else ordered[0][1])]
    for since, rate in ordered:
        if since <= started:
            continue
        if since == prices[-1][0]:
            prices[-1] = (since, rate)
        elif rate != prices[-1][1]:
            prices.append((since, rate))
    return prices


def list_stretches(
    prices: Sequence[tuple[datetime, HourlyRate]], until: datetime
) -> Iterable[tuple[datetime, datetime, HourlyRate]]:
    """Yield the start, end and rate of each price's period, up to the given time."""
    begun = [(since, rate) for since, rate in prices if since < until]
    for (since, rate), (end, _) in pairwise([*begun, (until, HourlyRate())]):
        yield since, end, rate


def _rate_at(prices: Sequence[tuple[datetime, HourlyRate]], at: datetime) -> HourlyRate:
    """Return the price that applied when the node ended. A price that begins exactly when the node
    ended is ignored, unless the price is the first one.
    """
    return [rate for since, rate in prices if since < at or since == prices[0][0]][-1]


def charge_node(
    attempt: Attempt,
    rank: int,
    since: datetime,
    until: datetime,
    rate: HourlyRate,
    kind: ChargeKind = ChargeKind.NODE,
) -> Charge:
    """Charge one node for [`since`, `until`) at one rate. The amount is rounded once."""
    return Charge(
        project=attempt.project,
        job_id=attempt.job_id,
        attempt_id=attempt.id,
        rank=rank,
        kind=kind,
        since=since,
        until=until,
        rate=rate,
        amount=rate.over(until - since),
    )

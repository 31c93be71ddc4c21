"""Computes the rows of a statement: the charges in a period, with one row for each line of a bill.

The ledger contains one entry for each increase of a running node's bill. A statement adds up the
ledger entries of a node. Corrections and discounts have rows of their own, apart from the charges.

Forecasts the total spending at the end of a month.
"""

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from math import sqrt
from statistics import fmean, stdev

from cavvy.domain.ledger import EntryKind, LedgerEntry, LedgerLine, QuantityUnit, month_of, share_of
from cavvy.domain.units import Money
from cavvy.domain.values import Struct, replace

_HOUR_US = 3_600_000_000
_UNMERGED = (EntryKind.CORRECTION, EntryKind.DISCOUNT)

DAYS = 14  # number of whole days before now on which the forecast is based
# 80 % of a normal distribution lie within this many standard deviations of its mean
_Z80 = 1.2816


def make_statement(
    lines: Iterable[LedgerLine], since: datetime, until: datetime
) -> list[LedgerLine]:
    """Return the lines for [since, until). Only the part of each entry within this period is used.
    Entries that have the same kind and belong to the same line of a bill become one line of the
    statement. This line has the ID of the first entry. The amounts of the lines add up to the
    amounts of the entries.
    """
    found: dict[tuple[object, ...], LedgerLine] = {}
    for line in lines:
        entry = _cut(line.entry, since, until)
        if entry is None:
            continue
        key: tuple[object, ...] = (entry.subject, entry.rank, entry.kind, entry.line)
        alone = entry.sequence if entry.kind in _UNMERGED else 0
        key = (*key, entry.line_since, entry.rate, entry.source, alone)
        known = found.get(key)
        merged = entry if known is None else _merge(known.entry, entry)
        found[key] = LedgerLine(entry=merged, subject=line.subject)
    return sorted(found.values(), key=_order)


def _order(line: LedgerLine) -> tuple[object, ...]:
    entry, subject = line.entry, line.subject
    return (entry.project, subject.user, subject.job, subject.id, entry.since, entry.number)


def _cut(entry: LedgerEntry, since: datetime, until: datetime) -> LedgerEntry | None:
    if since <= entry.since and entry.until <= until and entry.since < until:
        return entry
    if entry.until <= since or entry.since >= until:
        return None
    times = entry.since, entry.until, since, until
    return replace(
        entry,
        since=max(since, entry.since),
        until=min(until, entry.until),
        quantity=share_of(entry.quantity, *times),
        amount=Money(share_of(entry.amount.micros, *times)),
    )


def _merge(one: LedgerEntry, other: LedgerEntry) -> LedgerEntry:
    return replace(
        one,
        since=min(one.since, other.since),
        until=max(one.until, other.until),
        quantity=one.quantity + other.quantity,
        amount=one.amount + other.amount,
    )


def hours_of(entry: LedgerEntry) -> float:
    """Return the hours of a node that the entry covers, or 0 if the node is not billed by time."""
    return entry.quantity / _HOUR_US if entry.unit is QuantityUnit.MICROSECONDS else 0.0


def total_of(lines: Sequence[LedgerLine]) -> Money:
    """Return the sum of all lines."""
    return Money(sum(line.entry.amount.micros for line in lines))


def month_period(month: datetime) -> tuple[datetime, datetime]:
    """Return the period of the month that begins at `month`: its first moment and the first moment
    of the next month.
    """
    return month, (month + timedelta(days=32)).replace(day=1)


class SpendingForecast(Struct, frozen=True, kw_only=True):
    """The expected spending at the end of the month, and an interval for the spending. If spending
    on the remaining days is independent and distributed as on the earlier days, the interval
    contains the actual spending with a probability of about 80 %.
    """

    expected: Money
    low: Money
    high: Money


def forecast_month(spent: Money, daily: Sequence[int], now: datetime) -> SpendingForecast | None:
    """Forecast the spending of the month that contains `now`, from the amount spent so far in that
    month and the micro-dollars spent on each day in `daily`. Returns None if fewer than two days
    are given.

    The days have the mean m and the standard deviation s, and d days remain (not always a whole
    number). Then expected = spent + m d, and the interval is expected ± 1.2816 s √d. Its lower
    bound is at least `spent`.
    """
    if len(daily) < 2:
        return None
    _, end = month_period(month_of(now))
    left = (end - now).total_seconds() / 86400
    expected = spent.micros + fmean(daily) * left
    spread = _Z80 * stdev(daily) * sqrt(left)
    return SpendingForecast(
        expected=Money(round(expected)),
        low=Money(max(spent.micros, round(expected - spread))),
        high=Money(max(spent.micros, round(expected + spread))),
    )

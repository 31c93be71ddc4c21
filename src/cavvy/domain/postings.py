"""Computes the ledger entries for the changes of a bill, and divides entries into parts.

A bill is the list of a node's charges. The store calls `post` in the transaction that replaces the
charges, so the entries of each line of the bill always add up to the line's charge.
"""

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise

from cavvy.domain.events import Charge, ChargeKind
from cavvy.domain.ledger import EntryKind, EntrySource, LedgerPosting, QuantityUnit
from cavvy.domain.units import Money
from cavvy.domain.values import replace

ChargedPeriod = tuple[datetime, datetime]
_MICROSECOND = timedelta(microseconds=1)
KINDS = {
    ChargeKind.NODE: EntryKind.NODE,
    ChargeKind.KEPT: EntryKind.IDLE,
    ChargeKind.MINIMUM: EntryKind.IDLE,
    ChargeKind.ROLLED_BACK: EntryKind.IDLE,
    ChargeKind.DISK: EntryKind.DISK,
    ChargeKind.ADDRESS: EntryKind.ADDRESS,
    ChargeKind.TRAFFIC: EntryKind.TRAFFIC,
}


def post(before: Iterable[Charge], after: Iterable[Charge]) -> list[LedgerPosting]:
    """Return the postings that turn the charges `before` of one node into the charges `after`.

    If only the period of a line has become longer, an entry for the added time is posted. All
    changes except longer periods are corrections: for example, a shorter period, another price, or
    the removal of a line. No posting crosses the beginning of a month. Unchanged charges need no
    postings.
    """
    old = {(charge.kind, charge.since): charge for charge in before}
    new = {(charge.kind, charge.since): charge for charge in after}
    found: list[LedgerPosting] = []
    for key in sorted({**old, **new}, key=lambda each: (each[1], each[0])):
        posting = _post_line(old.get(key), new.get(key))
        if posting is not None:
            found += split_months(posting)
    return found


def _post_line(old: Charge | None, new: Charge | None) -> LedgerPosting | None:
    if old is None:
        return None if new is None else _posting(new, KINDS[new.kind], new.since, new.until)
    if new is None:
        return _posting(old, EntryKind.CORRECTION, old.since, old.until, sign=-1)
    if (old.until, old.amount, old.bytes) == (new.until, new.amount, new.bytes):
        return None
    same_rate = old.rate == new.rate
    more = _posting(new, KINDS[new.kind], old.until, new.until, less=old)
    longer = new.until > old.until or new.kind is ChargeKind.TRAFFIC
    if same_rate and longer and new.until >= old.until and more.amount.micros >= 0:
        return more
    since = min(old.until, new.until) if same_rate and old.until != new.until else new.since
    until = max(old.until, new.until)
    return replace(more, kind=EntryKind.CORRECTION, since=since, until=until)


def _posting(
    charge: Charge,
    kind: EntryKind,
    since: datetime,
    until: datetime,
    *,
    sign: int = 1,
    less: Charge | None = None,
) -> LedgerPosting:
    """Return a posting of `charge`. If `less` is given, its quantity and amount are subtracted."""
    sent = charge.kind is ChargeKind.TRAFFIC
    quantity = _quantity(charge) - (0 if less is None else _quantity(less))
    amount = charge.amount.micros - (0 if less is None else less.amount.micros)
    return LedgerPosting(
        kind=kind,
        line=str(charge.kind),
        line_since=charge.since,
        since=since,
        until=until,
        quantity=sign * quantity,
        unit=QuantityUnit.BYTES if sent else QuantityUnit.MICROSECONDS,
        rate=charge.rate,
        amount=Money(sign * amount),
        source=EntrySource.METER,
    )


def _quantity(charge: Charge) -> int:
    if charge.kind is ChargeKind.TRAFFIC:
        return charge.bytes
    return (charge.until - charge.since) // _MICROSECOND


def split_months(posting: LedgerPosting) -> Iterator[LedgerPosting]:
    """Split the posting at the beginning of each month in UTC, and yield the parts. The parts add
    up to the whole.
    """
    months = list_months(posting.since, posting.until)
    if not months:
        yield posting
        return
    for since, until in pairwise([posting.since, *months, posting.until]):
        whole = (posting.since, posting.until)
        yield replace(
            posting,
            since=since,
            until=until,
            quantity=share_of(posting.quantity, *whole, since, until),
            amount=Money(share_of(posting.amount.micros, *whole, since, until)),
        )


def list_months(since: datetime, until: datetime) -> Sequence[datetime]:
    """Return the beginnings of months after `since` and before `until`."""
    found, at = [], since
    while (at := next_month(at)) < until:
        found.append(at)
    return found


def next_month(at: datetime) -> datetime:
    """Return the beginning of the month after the month that contains the time."""
    return (month_of(at) + timedelta(days=32)).replace(day=1)


def month_of(at: datetime) -> datetime:
    """Return the beginning of the month, in UTC, that contains the time. The given time may have
    another time zone: Google reports times in Pacific time.
    """
    return at.astimezone(UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)


def find_discounted(
    charged: ChargedPeriod, posted: ChargedPeriod | None, more: int
) -> ChargedPeriod:
    """Return the period of a discount's new entry with the amount `more`. `charged` is the time in
    the month for which a subject was charged, and `posted` the time that earlier entries of the
    discount cover. If the discount has grown because newer time was charged, the entry covers the
    newer time. Otherwise, the entry covers the whole charged time. Therefore the discount accrues
    in the same days as the charges.
    """
    if posted is None or more > 0 or not charged[0] <= posted[1] < charged[1]:
        return charged
    return posted[1], charged[1]


def share_of(
    whole: int,
    since: datetime,
    until: datetime,
    first: datetime | None,
    last: datetime | None,
) -> int:
    """Return the part of `whole` that falls into [first, last), if `whole` accrues evenly in
    [since, until). If `first` or `last` is None, the window is unlimited on this side. The parts of
    adjacent windows add up exactly, because each part is the difference of two values that are
    rounded down in the same way. If the period [since, until) is empty, the whole amount belongs to
    the window that contains `since`.
    """
    if until <= since:
        inside = (first is None or first <= since) and (last is None or since < last)
        return whole if inside else 0
    begin = since if first is None else min(max(first, since), until)
    end = until if last is None else min(max(last, since), until)
    length = (until - since) // _MICROSECOND
    reached = [whole * ((at - since) // _MICROSECOND) // length for at in (begin, max(begin, end))]
    return reached[1] - reached[0]

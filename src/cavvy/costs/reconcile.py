"""Compares a cloud's bill with the ledger, by resource, day and kind.

While reading a bill, the caller adds each line to a `BillSummary`, and finally calls `reconcile`.
Therefore the required memory grows with the number of Cavvy's resources and the number of days, but
not with the length of the bill. If charges are missing from the bill, the caller reads the bill a
second time, and adds the lines without a tag for the days of these charges.

Each resource that is compared is a gang. The ledger identifies a gang's machines by the attempt,
and the bill identifies the machines by Cavvy's tag. The bill can also have lines without the tag.
If a resource of the ledger is missing from the bill, and a line without the tag has the same cost
on the same day, the line is taken for the line of this resource. A volume is compared together with
the disks of the gang that the volume's tag names, and with the disks of the jobs that used the
volume (`shared_disks`).
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import StrEnum
from typing import NamedTuple

from cavvy.costs.bills import USD, BadBillLine, BillCategory, BilledKind, BillLine
from cavvy.costs.shared_disks import name_disk
from cavvy.domain.events import ChargeKind
from cavvy.domain.ledger import STORAGE_LINE, EntryKind, LedgerLine, QuantityUnit, share_of
from cavvy.domain.values import Struct, replace

_HOUR_US = 3_600_000_000
_LONGEST = timedelta(days=36_525)
_DAY = timedelta(days=1)
_MICRO = Decimal("0.000001")
# The ledger rounds each entry, and each day's part of an entry, to a micro-dollar.
_OWN_ROUNDING = 2 * _MICRO
_SHOWN = 5  # maximum number of lines that a difference names
_KINDS: dict[str, BilledKind] = {
    ChargeKind.DISK: BilledKind.DISK,
    ChargeKind.ADDRESS: BilledKind.ADDRESS,
    ChargeKind.TRAFFIC: BilledKind.TRAFFIC,
    STORAGE_LINE: BilledKind.DISK,
}

_LINES = frozenset({STORAGE_LINE, *map(str, ChargeKind)})


class DifferenceCause(StrEnum):
    """The likely cause of a difference."""

    NOT_IN_LEDGER = "not in ledger"
    NOT_IN_BILL = "not in bill"
    RATE = "other rate"
    DURATION = "other duration"
    AMOUNT = "other amount"  # the bill does not state the duration
    # the sum over the days is the same, for example because of another time zone
    DAYS = "other days"
    ROUNDING = "rounding"
    TAX = "tax"
    CREDIT = "credit"
    DISCOUNT = "discount"
    FEE = "fee"
    CURRENCY = "other currency"
    UNTAGGED = "untagged"
    DELAYED = "delayed"  # the bill does not reach the end of the day yet
    DUPLICATE = "duplicate"
    UNREADABLE = "unreadable"


_OF_CATEGORY = {
    BillCategory.TAX: DifferenceCause.TAX,
    BillCategory.CREDIT: DifferenceCause.CREDIT,
    BillCategory.DISCOUNT: DifferenceCause.DISCOUNT,
    BillCategory.ROUNDING: DifferenceCause.ROUNDING,
    BillCategory.FEE: DifferenceCause.FEE,
}
_REDUCTIONS = frozenset({DifferenceCause.CREDIT, DifferenceCause.DISCOUNT})


class BilledSum(Struct, kw_only=True):
    """The sum of the bill's or the ledger's lines for one resource, kind and day."""

    amount: Decimal = Decimal(0)
    hours: Decimal | None = Decimal(0)
    currency: str = USD
    count: int = 0  # number of lines or entries
    decimals: int = 0  # decimal places of the amount with the most of them
    long: bool = False  # whether a line is for more than a day
    lines: tuple[int, ...] = ()  # numbers of the first lines
    resources: tuple[str, ...] = ()
    project: str = ""
    job: str = ""

    def take(self, other: "BilledSum") -> None:
        """Add another sum; both sums are for the same resource and kind."""
        self.amount += other.amount
        both = self.hours is not None and other.hours is not None
        self.hours = (self.hours or 0) + (other.hours or Decimal(0)) if both else None
        self.count += other.count
        self.decimals = max(self.decimals, other.decimals)
        self.long = self.long or other.long
        if other.currency != USD:
            self.currency = other.currency
        self.lines = (*self.lines, *other.lines)[:_SHOWN]
        new = tuple(each for each in other.resources if each not in self.resources)
        self.resources = (*self.resources, *new)[:_SHOWN]
        self.project, self.job = self.project or other.project, self.job or other.job


KindOnDay = tuple[BilledKind, date]


class CellKey(NamedTuple):
    """The key under which charges of the bill and of the ledger are compared. `resource` is the
    name of a gang, or of a cloud's resource without a tag.
    """

    resource: str
    kind: BilledKind
    day: date


class Difference(Struct, frozen=True, kw_only=True):
    """A difference between the bill and the ledger. `ledger` is None if the charge is missing from
    the ledger, and `bill` is None if the charge is missing from the bill. `bill` is in the currency
    `billed_in`. `lines` contains the numbers of the first lines of the bill with this difference.
    `ledger_hours` and `bill_hours` are machine hours. `ledger_hours` and `bill_hours` are set only
    if the ledger and the bill both state hours.
    """

    cause: DifferenceCause
    resource: str = ""
    project: str = ""
    job: str = ""
    kind: BilledKind | None = None
    day: date | None = None
    ledger: Decimal | None = None
    bill: Decimal | None = None
    billed_in: str = USD
    ledger_hours: Decimal | None = None
    bill_hours: Decimal | None = None
    lines: tuple[int, ...] = ()
    bad: BadBillLine | None = None

    @property
    def ledger_micros(self) -> int | None:
        """The ledger's amount in micro-dollars."""
        return None if self.ledger is None else round(self.ledger / _MICRO)

    @property
    def bill_micros(self) -> int | None:
        """The bill's amount in millionths of its currency."""
        return None if self.bill is None else round(self.bill / _MICRO)

    @property
    def more_micros(self) -> int | None:
        """The amount by which the bill exceeds the ledger, in micro-dollars, or None if the bill is
        in another currency.
        """
        if self.billed_in != USD:
            return None
        return (self.bill_micros or 0) - (self.ledger_micros or 0)


class BillSummary:
    """The lines of a bill, added up by resource, kind and day as they are read. Only days in the
    given period are added up. The period begins and ends at midnight in UTC; None means no limit.
    """

    def __init__(self, since: datetime | None = None, until: datetime | None = None) -> None:
        self._first_day = None if since is None else since.date()
        self._end_day = None if until is None else until.date()
        self.tagged: dict[CellKey, BilledSum] = {}
        self.disks: dict[str, str] = {}  # the gang in the tag of each disk
        self._groups: Mapping[str, str] = {}
        self.untagged: dict[CellKey, BilledSum] = {}
        self.found: list[Difference] = []  # what the bill shows without the ledger
        self.reductions: list[Difference] = []  # credits and discounts
        self._own = {
            ""
        }  # gangs and resources with Cavvy's tag; "" if a line is for the whole account
        self.first: datetime | None = None
        self._reached: dict[bool, datetime] = {}  # the ends of long lines and of other lines
        self.lines = 0
        self._twice: set[int] = set()  # numbers of lines that were left out as duplicates
        self._seen: set[int] = set()

    def add(self, line: BillLine | BadBillLine) -> None:
        """Add a line of the bill."""
        self.lines += 1
        if isinstance(line, BadBillLine):
            self.found.append(_alone(DifferenceCause.UNREADABLE, (line.number,), bad=line))
            return
        if line.number in self._twice:
            return
        if line.identity is not None:
            if line.identity in self._seen:
                self.found.append(_of_line(DifferenceCause.DUPLICATE, line))
                self._twice.add(line.number)
                return
            self._seen.add(line.identity)
        if line.gang:
            self._own |= {line.resource, line.gang}
        cause = _OF_CATEGORY.get(line.category)
        if cause is not None:
            self._add_other(line, cause)
            return
        self.first = line.since if self.first is None else min(self.first, line.since)
        long = _is_long(line)
        self._reached[long] = max(line.until, self._reached.get(long, line.until))
        if line.gang:
            if line.kind is BilledKind.DISK and line.resource:
                self.disks[name_disk(line.resource)] = line.gang
            for day, part in self._split(line):
                key = CellKey(line.gang, line.kind, day)
                self.tagged.setdefault(key, BilledSum()).take(part)

    def _add_other(self, line: BillLine, cause: DifferenceCause) -> None:
        """Add a line that is not for usage. Only its part in the period counts."""
        rows = self.reductions if cause in _REDUCTIONS else self.found
        parts = [part.amount for _, part in self._split(line)]
        if parts:
            rows.append(_of_line(cause, replace(line, amount=sum(parts, Decimal(0)))))

    @property
    def last(self) -> datetime | None:
        """The time that the bill reaches. A line for a whole month, such as a subscription, may end
        in the future, so long lines are used only if the bill has no other lines.
        """
        return self._reached.get(False, self._reached.get(True))

    def _split(self, line: BillLine) -> Iterator[tuple[date, BilledSum]]:
        """Yield the parts of the line that are on days of the period."""
        for day, part in _split_line(line):
            early = self._first_day is not None and day < self._first_day
            if not early and (self._end_day is None or day < self._end_day):
                yield day, part

    def add_untagged(self, line: BillLine | BadBillLine, wanted: Collection[KindOnDay]) -> None:
        """Add a line from the second reading of the bill, if the line has no tag and its kind and
        day are in `wanted`.
        """
        if isinstance(line, BadBillLine) or line.gang or line.number in self._twice:
            return
        if line.category is not BillCategory.USAGE:
            return
        for day, part in self._split(line):
            if (line.kind, day) in wanted:
                key = CellKey(line.resource, line.kind, day)
                self.untagged.setdefault(key, BilledSum()).take(part)

    def join_disks(self, groups: Mapping[str, str]) -> None:
        """Add up the disk charges of each group of gangs and volumes, because these charges can be
        compared only as one sum. Call this method after all lines have been added.
        """
        self._groups = groups
        self.tagged = self.name_gangs(self.tagged, {})

    def name_gangs(
        self, cells: Mapping[CellKey, BilledSum], gangs: Mapping[str, str]
    ) -> dict[CellKey, BilledSum]:
        """Return the sums, keyed by the name of the gang or of the group of disks. If the gang of a
        resource is unknown, the sum is kept under the name of the resource.
        """
        found: dict[CellKey, BilledSum] = {}
        for key, each in cells.items():
            name = gangs.get(key.resource, key.resource)
            if key.kind is BilledKind.DISK:
                name = self._groups.get(name, name)
            found.setdefault(CellKey(name, key.kind, key.day), BilledSum()).take(each)
        return found

    @property
    def own_reductions(self) -> list[Difference]:
        """The credits and discounts, without those of resources that other programs created."""
        return [each for each in self.reductions if each.resource in self._own]

    @property
    def resources(self) -> frozenset[str]:
        """The names of the gangs in the bill's tags."""
        return frozenset(key.resource for key in self.tagged)


def add_up_bill(
    lines: Iterable[BillLine | BadBillLine],
    since: datetime | None = None,
    until: datetime | None = None,
) -> BillSummary:
    """Return the sums of the lines in the period; see `BillSummary`."""
    bill = BillSummary(since, until)
    for line in lines:
        bill.add(line)
    return bill


def _split_line(line: BillLine) -> Iterator[tuple[date, BilledSum]]:
    """Divide the amount of a bill's line among the days of the line, in proportion to the time on
    each day.
    """
    length = (line.until - line.since) // timedelta(microseconds=1)
    decimals = max(0, -int(line.amount.as_tuple().exponent))
    for since, until in _days(line.since, line.until):
        us = (until - since) // timedelta(microseconds=1)
        share = Decimal(us) / Decimal(length) if length else Decimal(1)
        yield (
            since.date(),
            BilledSum(
                amount=line.amount * share,
                hours=None if line.hours is None else line.hours * share,
                currency=line.currency,
                count=1,
                decimals=decimals,
                long=_is_long(line),
                lines=(line.number,),
                resources=(line.resource,) if line.resource else (),
            ),
        )


def _is_long(line: BillLine) -> bool:
    return line.until - line.since > _DAY


def _days(since: datetime, until: datetime) -> Iterator[tuple[datetime, datetime]]:
    """Return the period, split at the beginning of each day in UTC. A period of a hundred years, as
    a damaged bill can have, stays whole."""
    at = since
    if until - since > _LONGEST:
        yield since, until
        return
    while at.date() < until.date():
        midnight = datetime.combine(at.date() + _DAY, time(), at.tzinfo)
        yield at, midnight
        at = midnight
    if at < until or since == until:
        yield at, until


def add_up_ledger(
    lines: Iterable[LedgerLine], provider: str, since: datetime, until: datetime
) -> tuple[dict[CellKey, BilledSum], Decimal]:
    """Return the provider's charges in [since, until) by attempt, kind and day, and the provider's
    discounts.
    """
    sums: dict[CellKey, BilledSum] = {}
    discounts = Decimal(0)
    for line in lines:
        entry, subject = line.entry, line.subject
        if subject.provider != provider:
            continue
        period = entry.since, entry.until
        if entry.kind is EntryKind.DISCOUNT:
            discounts += share_of(entry.amount.micros, *period, since, until) * _MICRO
            continue
        first, last = max(entry.since, since), min(entry.until, until)
        if first > last or first >= until or (first == last and entry.since < entry.until):
            continue
        if entry.line not in _LINES:
            continue  # replicas' bills that were divided
        kind = _KINDS.get(entry.line, BilledKind.MACHINE)
        for begin, end in _days(first, last):
            key = CellKey(subject.id, kind, begin.date())
            sums.setdefault(key, BilledSum()).take(_part(line, kind, begin, end))
    return sums, discounts


def _part(line: LedgerLine, kind: BilledKind, since: datetime, until: datetime) -> BilledSum:
    """Return the part of an entry that is in a period. If `since` equals `until`, the charge
    belongs to a single moment, and the whole entry is returned.
    """
    entry = line.entry
    us, micros = entry.quantity, entry.amount.micros
    if since < until:
        us = share_of(us, entry.since, entry.until, since, until)
        micros = share_of(micros, entry.since, entry.until, since, until)
    timed = entry.unit is QuantityUnit.MICROSECONDS and kind is BilledKind.MACHINE
    return BilledSum(
        amount=micros * _MICRO,
        hours=Decimal(us) / _HOUR_US if timed else None,
        count=1,
        project=line.subject.project,
        job=line.subject.job,
    )


def match_gangs(gangs: Iterable[str], attempts: Iterable[str]) -> dict[str, str]:
    """Return the gang of each attempt that started a gang. A gang's name is a prefix followed by
    the attempt's name. Attempts without a gang in the bill are omitted.
    """
    by_attempt: dict[str, str] = {}
    wanted = frozenset(attempts)
    for gang in gangs:
        parts = gang.split("-")
        for at in range(len(parts)):
            attempt = "-".join(parts[at:])
            if attempt in wanted:
                by_attempt[attempt] = gang
                break
    return by_attempt


def find_lacking(
    bill: BillSummary, ledger: Mapping[CellKey, BilledSum], gangs: Mapping[str, str]
) -> frozenset[KindOnDay]:
    """Return each pair of kind and day on which the ledger charges a resource, but the bill
    contains no charge for this resource.
    """
    own = bill.name_gangs(ledger, gangs)
    return frozenset((key.kind, key.day) for key in own if key not in bill.tagged)


def reconcile(
    bill: BillSummary,
    ledger: Mapping[CellKey, BilledSum],
    gangs: Mapping[str, str],
    discounts: Decimal = Decimal(0),
) -> list[Difference]:
    """Return the differences, in the order of days. `gangs` maps each attempt in the ledger to its
    gang; an attempt without an entry is not in the bill. `discounts` are the discounts of the
    ledger, 0 or less.
    """
    own = bill.name_gangs(ledger, gangs)
    found = [*bill.found, *_compare_reductions(bill.own_reductions, discounts)]
    groups: dict[tuple[str, BilledKind], list[CellKey]] = {}
    for key in sorted({*own, *bill.tagged}, key=lambda each: (each.day, each.resource, each.kind)):
        groups.setdefault((key.resource, key.kind), []).append(key)
    free: dict[KindOnDay, list[CellKey]] = {}
    for key in bill.untagged:
        free.setdefault((key.kind, key.day), []).append(key)
    for keys in groups.values():
        found += _compare_resource(keys, own, bill, free)
    return sorted(found, key=_order)


def _order(found: Difference) -> tuple[object, ...]:
    day = found.day or date.min
    return (found.day is None, day, found.resource, found.kind or "", found.lines)


def _compare_resource(
    keys: Sequence[CellKey],
    own: Mapping[CellKey, BilledSum],
    bill: BillSummary,
    free: Mapping[KindOnDay, list[CellKey]],
) -> list[Difference]:
    """Return the differences of one resource and kind, for all days."""
    found = []
    for key in keys:
        billed, charged = bill.tagged.get(key), own.get(key)
        each = _compare_cell(key, charged, billed, bill.last)
        if charged and each is not None and each.cause is DifferenceCause.NOT_IN_BILL:
            each = _look_untagged(key, charged, bill, free) or each
        if each is not None:
            found.append(each)
    if not found:
        return []
    whole, charged_whole = BilledSum(), BilledSum()
    for key in keys:
        whole.take(bill.tagged.get(key, BilledSum()))
        charged_whole.take(own.get(key, BilledSum()))
    if whole.count and charged_whole.count and _is_same(whole, charged_whole):
        if whole.long:  # the bill does not state the days
            return []
        if len(found) > 1:
            moved = _difference(DifferenceCause.DAYS, keys[0], charged_whole, whole)
            return [moved]
    return found


def _compare_cell(
    key: CellKey, charged: BilledSum | None, billed: BilledSum | None, last: datetime | None
) -> Difference | None:
    if billed is not None and billed.currency != USD:
        return _difference(DifferenceCause.CURRENCY, key, charged, billed)
    if charged is None:
        if billed is None or abs(billed.amount) <= _OWN_ROUNDING:
            return None
        return _difference(DifferenceCause.NOT_IN_LEDGER, key, None, billed)
    open_day = last is None or last < datetime.combine(key.day + _DAY, time(), last.tzinfo)
    if billed is None:
        if abs(charged.amount) <= _OWN_ROUNDING * charged.count:
            return None
        cause = DifferenceCause.DELAYED if open_day else DifferenceCause.NOT_IN_BILL
        return _difference(cause, key, charged, None)
    if _is_same(billed, charged):
        return None
    if open_day and billed.amount < charged.amount:
        return _difference(DifferenceCause.DELAYED, key, charged, billed)
    return _difference(_explain(billed, charged), key, charged, billed)


def _is_same(billed: BilledSum, charged: BilledSum) -> bool:
    if billed.currency != USD:
        return False
    allowed = _OWN_ROUNDING * (billed.count + charged.count)
    return abs(billed.amount - charged.amount) <= allowed


def _explain(billed: BilledSum, charged: BilledSum) -> DifferenceCause:
    """Return the cause of the difference: the hours or the rate, whichever differs more."""
    if abs(billed.amount - charged.amount) <= _rounding(billed, charged):
        return DifferenceCause.ROUNDING
    if not billed.hours or not charged.hours:
        return DifferenceCause.AMOUNT
    longer = billed.hours / charged.hours
    if not billed.amount or not charged.amount:
        return DifferenceCause.RATE
    dearer = billed.amount / charged.amount / longer
    if dearer <= 0:
        return DifferenceCause.RATE
    return DifferenceCause.DURATION if _far(longer) > _far(dearer) else DifferenceCause.RATE


def _rounding(billed: BilledSum, charged: BilledSum) -> Decimal:
    """Return the largest difference that rounding can cause. The result is a sum: half a unit of
    the last decimal place for each line of the bill, and the ledger's own rounding for each entry
    of the ledger.
    """
    half = Decimal(10) ** -max(2, billed.decimals) / 2
    return half * billed.count + _OWN_ROUNDING * charged.count


def _far(ratio: Decimal) -> Decimal:
    """Return how far a ratio is from 1; the result is the same for a ratio and its inverse."""
    return max(ratio, 1 / ratio) if ratio > 0 else Decimal("Infinity")


def _look_untagged(
    key: CellKey,
    charged: BilledSum,
    bill: BillSummary,
    free: Mapping[KindOnDay, list[CellKey]],
) -> Difference | None:
    """Return the untagged resource whose cost equals the amount missing from the bill. Each
    untagged resource is returned at most once.
    """
    candidates = free.get((key.kind, key.day), [])
    for other in candidates:
        billed = bill.untagged[other]
        if billed.currency == USD and abs(billed.amount - charged.amount) <= _rounding(
            billed, charged
        ):
            candidates.remove(other)
            return _difference(DifferenceCause.UNTAGGED, key, charged, billed)
    return None


def _compare_reductions(rows: Sequence[Difference], discounts: Decimal) -> list[Difference]:
    """Compare the sum of the bill's credits and discounts with the sum of the ledger's discounts.
    Return no difference if the sums are equal up to rounding. Amounts in other currencies are
    always differences.
    """
    total = sum((each.bill or Decimal(0) for each in rows if each.billed_in == USD), Decimal(0))
    if abs(total - discounts) <= _OWN_ROUNDING * (len(rows) + 1):
        return [each for each in rows if each.billed_in != USD]
    if discounts:
        return [*rows, Difference(cause=DifferenceCause.DISCOUNT, ledger=discounts)]
    return list(rows)


def _difference(
    cause: DifferenceCause, key: CellKey, charged: BilledSum | None, billed: BilledSum | None
) -> Difference:
    known = charged or BilledSum()
    return Difference(
        cause=cause,
        resource=(billed.resources[0] if billed and billed.resources else "") or key.resource,
        project=known.project,
        job=known.job,
        kind=key.kind,
        day=key.day,
        ledger=None if charged is None else charged.amount,
        bill=None if billed is None else billed.amount,
        billed_in=USD if billed is None else billed.currency,
        ledger_hours=None if charged is None else charged.hours,
        bill_hours=None if billed is None else billed.hours,
        lines=() if billed is None else billed.lines,
    )


def _alone(cause: DifferenceCause, lines: tuple[int, ...], bad: BadBillLine) -> Difference:
    return Difference(cause=cause, lines=lines, bad=bad)


def _of_line(cause: DifferenceCause, line: BillLine) -> Difference:
    return Difference(
        cause=cause,
        resource=line.resource or line.gang,
        kind=line.kind,
        day=line.since.date(),
        bill=line.amount,
        billed_in=line.currency,
        bill_hours=line.hours,
        lines=(line.number,),
    )

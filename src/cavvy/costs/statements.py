"""Computes the rows of a statement: the charges in a period, with one row for each line of a bill.
Forecasts the total spending at the end of a month.

The ledger contains one entry for each increase of a running node's bill. A statement adds up the
ledger entries of a node. Corrections and discounts have rows of their own, apart from the charges.

Writes rows in the FinOps Open Cost and Usage Specification (FOCUS), version 1.0: columns and
allowed values are at https://focus.finops.org/focus-specification/v1-0/. Cavvy's own columns begin
with `x_`, as the specification requires. `focus-validator` 1.0.0 expects five columns under the
names that they had before version 1.0, so these columns are written under the old and the new name.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from math import sqrt
from statistics import fmean, stdev

from cavvy.domain.events import ChargeKind
from cavvy.domain.ledger import (
    STORAGE_LINE,
    EntryKind,
    LedgerEntry,
    LedgerLine,
    QuantityUnit,
    month_of,
    share_of,
)
from cavvy.domain.offers import Purchase
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


FocusRow = Mapping[str, str | Decimal | datetime | None]
_NAMES_BEFORE = {
    "Provider": "ProviderName",
    "Publisher": "PublisherName",
    "InvoiceIssuer": "InvoiceIssuerName",
    "ResourceID": "ResourceId",
    "ChargeType": "ChargeCategory",
}
_PRICING = {
    Purchase.ON_DEMAND: "Standard",
    Purchase.SPOT: "Dynamic",
    Purchase.RESERVED: "Committed",
}
# For each kind of charge: the category of the service, and the type of the resource.
_SERVICES: Mapping[str, tuple[str, str]] = {
    ChargeKind.DISK: ("Storage", "Disk"),
    ChargeKind.ADDRESS: ("Networking", "Public address"),
    ChargeKind.TRAFFIC: ("Networking", "Data transfer"),
    STORAGE_LINE: ("Storage", "Disk"),
}
# The unit of the quantity, and the number of the ledger's units in one such unit.
_UNITS: Mapping[QuantityUnit, tuple[str | None, int]] = {
    QuantityUnit.BYTES: ("GB", 10**9),
    QuantityUnit.MICROSECONDS: ("Hours", 3_600_000_000),
    QuantityUnit.REQUESTS: ("Requests", 1),
    # for an amount that was moved to other kinds of charge; its hours stay with the original kind
    QuantityUnit.NONE: ("Hours", 1),
}
_NUMBERS = (
    "BilledCost",
    "ConsumedQuantity",
    "ContractedCost",
    "ContractedUnitPrice",
    "EffectiveCost",
    "ListCost",
    "ListUnitPrice",
    "PricingQuantity",
)
_TIMES = ("BillingPeriodEnd", "BillingPeriodStart", "ChargePeriodEnd", "ChargePeriodStart")
_TEXTS = (
    "AvailabilityZone",
    "BillingAccountId",
    "BillingAccountName",
    "BillingCurrency",
    "ChargeCategory",
    "ChargeClass",
    "ChargeDescription",
    "ChargeFrequency",
    "CommitmentDiscountCategory",
    "CommitmentDiscountId",
    "CommitmentDiscountName",
    "CommitmentDiscountStatus",
    "CommitmentDiscountType",
    "ConsumedUnit",
    "InvoiceIssuerName",
    "PricingCategory",
    "PricingUnit",
    "ProviderName",
    "PublisherName",
    "RegionId",
    "RegionName",
    "ResourceId",
    "ResourceName",
    "ResourceType",
    "ServiceCategory",
    "ServiceName",
    "SkuId",
    "SkuPriceId",
    "SubAccountId",
    "SubAccountName",
    "Tags",
    *_NAMES_BEFORE,
    "x_User",
    "x_Service",
    "x_Key",
    "x_Attempt",
    "x_EntryId",
    "x_Corrects",
    "x_Kind",
    "x_Line",
    "x_Source",
    "x_Accelerator",
    "x_Accelerators",
)
NUMBERS = frozenset(_NUMBERS)
TIMES = frozenset(_TIMES)
_OWN = tuple(name for name in _TEXTS if name.startswith("x_"))
COLUMNS = (*sorted({*_NUMBERS, *_TIMES, *_TEXTS} - {*_OWN}), *_OWN)


def make_focus_row(line: LedgerLine) -> FocusRow:
    """Return the row for one line of a statement. A column that does not apply is None."""
    row = {**_describe_what(line), **_describe_cost(line), **_describe_time(line)}
    row |= {before: row[name] for before, name in _NAMES_BEFORE.items()}
    return {name: row.get(name) for name in COLUMNS}


def _describe_what(line: LedgerLine) -> dict[str, str | Decimal | datetime | None]:
    entry, subject = line.entry, line.subject
    service, resource = _SERVICES.get(entry.line, ("Compute", "Virtual machine"))
    sku = f"{subject.provider}/{subject.instance_type}/{resource}"
    corrects = None if entry.corrects is None else f"{subject.id}/{entry.rank}/{entry.corrects}"
    return {
        "AvailabilityZone": subject.zone or None,
        "BillingAccountId": subject.account,
        "BillingAccountName": subject.account,
        "ChargeDescription": _describe(line),
        "InvoiceIssuerName": subject.provider,
        "ProviderName": subject.provider,
        "PublisherName": subject.provider,
        "RegionId": subject.region or None,
        "RegionName": subject.region or None,
        "ResourceId": f"{subject.id}/{entry.rank}",
        "ResourceName": subject.job or subject.volume or subject.service or None,
        "ResourceType": resource,
        "ServiceCategory": service,
        "ServiceName": f"{subject.provider} {resource}",
        "SkuId": sku,
        "SkuPriceId": f"{sku}/{subject.region}/{subject.purchase}",
        "SubAccountId": entry.project,
        "SubAccountName": entry.project,
        "Tags": json.dumps(subject.tags, sort_keys=True),
        "x_User": subject.user or None,
        "x_Service": subject.service or None,
        "x_Key": subject.key or None,
        "x_Attempt": str(subject.attempt),
        "x_EntryId": entry.id,
        "x_Corrects": corrects,
        "x_Kind": str(entry.kind),
        "x_Line": entry.line,
        "x_Source": str(entry.source),
        "x_Accelerator": subject.accelerator or None,
        "x_Accelerators": f"{subject.accelerators:g}",
    }


def _describe(line: LedgerLine) -> str:
    entry, subject = line.entry, line.subject
    if subject.volume:
        return f"volume {subject.volume} between jobs"
    if not subject.job:
        return f"{entry.line} of service {subject.service}"
    return f"{entry.line} of job {subject.job}, attempt {subject.attempt}, node {entry.rank}"


def _describe_cost(line: LedgerLine) -> dict[str, str | Decimal | datetime | None]:
    entry, discount = line.entry, line.entry.kind is EntryKind.DISCOUNT
    cost = entry.amount.usd
    unit, per_unit = _UNITS[entry.unit]
    quantity = None if discount else Decimal(entry.quantity) / per_unit
    price = entry.rate.usd if unit == "Hours" and not discount else None
    unit = None if discount else unit
    return {
        "BilledCost": cost,
        "BillingCurrency": "USD",
        "ChargeCategory": "Credit" if discount else "Usage",
        "ChargeClass": "Correction" if entry.kind is EntryKind.CORRECTION else None,
        "ChargeFrequency": "One-Time" if discount else "Usage-Based",
        "ConsumedQuantity": quantity,
        "ConsumedUnit": unit,
        "ContractedCost": cost,
        "ContractedUnitPrice": price,
        "EffectiveCost": cost,
        "ListCost": Decimal(0) if discount else cost,
        "ListUnitPrice": price,
        "PricingCategory": None if discount else _PRICING.get(Purchase(line.subject.purchase)),
        "PricingQuantity": quantity,
        "PricingUnit": unit,
    }


def _describe_time(line: LedgerLine) -> dict[str, str | Decimal | datetime | None]:
    """Return the periods. The specification does not permit empty periods, so a charge whose start
    equals its end gets a period of one second."""
    since = line.entry.since.astimezone(UTC)
    until = max(line.entry.until.astimezone(UTC), since + timedelta(seconds=1))
    start, end = month_period(month_of(since))
    return {
        "BillingPeriodStart": start,
        "BillingPeriodEnd": end,
        "ChargePeriodStart": since,
        "ChargePeriodEnd": until,
    }

"""Writes rows of a statement in the FinOps Open Cost and Usage Specification (FOCUS), version 1.0.

Columns and allowed values: https://focus.finops.org/focus-specification/v1-0/. Cavvy's own columns
begin with `x_`, as the specification requires. `focus-validator` 1.0.0 expects five columns under
the names that they had before version 1.0, so these columns are written under the old and the new
name.
"""

import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from decimal import Decimal

from cavvy.costs.statements import month_period
from cavvy.domain.events import ChargeKind
from cavvy.domain.ledger import STORAGE_LINE, EntryKind, LedgerLine, QuantityUnit, month_of
from cavvy.domain.offers import Purchase

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

"""Reads Azure cost and usage details, as Cost Management exports them.

Microsoft's page "Understand cost details fields" explains the columns:
https://learn.microsoft.com/azure/cost-management-billing/automate/understand-usage-details-fields.
The folder dataset-schema/ of the same documentation lists the columns for each agreement: the
Enterprise Agreement (schema of 2024-08-01), the Microsoft Customer Agreement and pay-as-you-go
(schemas of 2019-11-01). Both sources were read on 2026-11-24. Dates have no time: a line covers a
day, in UTC. Column names begin with a capital or a small letter, depending on the agreement.
"""

from collections.abc import Iterator
from datetime import timedelta

from cavvy.cli.reach.bills.rows import BillRow, amount, currency, moment, number, tags_of, text
from cavvy.costs.bills import BillCategory, BilledKind, BillLine

_COST = ("CostInBillingCurrency", "costInBillingCurrency", "Cost", "PreTaxCost")
_DATE = ("Date", "date", "UsageDateTime")
_RESOURCE = ("ResourceId", "resourceId", "InstanceId", "InstanceName")
_CATEGORY = ("MeterCategory", "meterCategory")
_CURRENCY = ("BillingCurrencyCode", "BillingCurrency", "billingCurrency", "Currency")
REQUIRED = (_COST, _DATE, _RESOURCE, _CATEGORY)
_GANG = "cavvy-gang"  # the tag that Cavvy sets
_TYPES = {
    "tax": BillCategory.TAX,
    "refund": BillCategory.CREDIT,
    "purchase": BillCategory.FEE,
    "unusedreservation": BillCategory.FEE,
    "unusedsavingsplan": BillCategory.FEE,
    "roundingadjustment": BillCategory.ROUNDING,
}


def read_row(row: BillRow, line: int) -> Iterator[BillLine]:
    """Yield the bill line of the row. Raises WrongBillValue."""
    since = moment(row, *_DATE)
    meter = f"{text(row, *_CATEGORY)}/{text(row, 'MeterName', 'meterName')}"
    kind = _kind(meter)
    unit = text(row, "UnitOfMeasure", "unitOfMeasure")
    hourly = kind is BilledKind.MACHINE and "hour" in unit.lower()
    yield BillLine(
        number=line,
        resource=text(row, *_RESOURCE),
        gang=tags_of(row.get("Tags", row.get("tags"))).get(_GANG, ""),
        kind=kind,
        category=_TYPES.get(text(row, "ChargeType", "chargeType").lower(), BillCategory.USAGE),
        since=since,
        until=since + timedelta(days=1),
        hours=number(row, "Quantity", "quantity", "UsageQuantity") if hourly else None,
        amount=amount(row, *_COST),
        currency=currency(row, *_CURRENCY),
        identity=hash(tuple(map(str, row.values()))),
    )


def _kind(meter: str) -> BilledKind:
    category, _, name = meter.partition("/")
    if category.startswith("Virtual Machines"):
        return BilledKind.MACHINE
    if category == "Bandwidth":
        return BilledKind.TRAFFIC
    if category == "Virtual Network" and "IP" in name:
        return BilledKind.ADDRESS
    if category == "Storage" and "Disk" in name:
        return BilledKind.DISK
    return BilledKind.OTHER

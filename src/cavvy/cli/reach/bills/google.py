"""Reads Google Cloud's detailed billing export: rows of its BigQuery table as JSON, or as CSV from
a query that names fields of records with a dot or an underscore.

Fields: "Structure of Detailed data export",
https://cloud.google.com/billing/docs/how-to/export-data-bigquery-tables/detailed-usage, read on
2026-11-24. Amounts of `credits` are negative and become separate bill lines. `usage.amount` of
machines is in seconds, summed over all cores or bytes of memory, so the amount is not the running
time of a machine.
"""

from collections.abc import Iterator

from cavvy.cli.reach.bills.rows import BillRow, amount, currency, moment, tags_of, text
from cavvy.costs.bills import BillCategory, BilledKind, BillLine
from cavvy.domain.values import replace

_RESOURCE = ("resource.global_name", "resource_global_name", "resource.name", "resource_name")
REQUIRED = (("cost",), ("usage_start_time",), ("usage_end_time",), ("currency",))
_GANG = "cavvy-gang"  # the label that Cavvy sets
_TYPES = {
    "tax": BillCategory.TAX,
    "adjustment": BillCategory.CREDIT,
    "rounding_error": BillCategory.ROUNDING,
}


def read_row(row: BillRow, line: int) -> Iterator[BillLine]:
    """Yield the bill line of the row, and a line for the row's credits. Raises WrongBillValue."""
    labels = tags_of(row.get("labels"))
    found = BillLine(
        number=line,
        resource=text(row, *_RESOURCE),
        gang=labels.get(_GANG) or text(row, "labels.cavvy-gang", "labels_cavvy_gang"),
        kind=_kind(text(row, "sku.description", "sku_description")),
        category=_TYPES.get(text(row, "cost_type"), BillCategory.USAGE),
        since=moment(row, "usage_start_time"),
        until=moment(row, "usage_end_time"),
        amount=amount(row, "cost"),
        currency=currency(row, "currency"),
        identity=hash(repr(sorted((key, str(each)) for key, each in row.items()))),
    )
    yield found
    credits = row.get("credits")
    given = (
        [each for each in credits if isinstance(each, dict)] if isinstance(credits, list) else []
    )
    less = sum((amount(each, "amount") for each in given), amount(row, "credits_amount"))
    if less:
        yield replace(found, category=BillCategory.CREDIT, amount=less, identity=None)


def _kind(sku: str) -> BilledKind:
    """Return the kind of charge. Cores, memory and GPUs of a machine have separate lines."""
    if "PD Capacity" in sku or "Hyperdisk" in sku or "Local SSD" in sku:
        return BilledKind.DISK
    if "External IP" in sku:
        return BilledKind.ADDRESS
    if "Egress" in sku or "Data Transfer" in sku:
        return BilledKind.TRAFFIC
    if any(part in sku for part in ("Core", "Ram", "GPU", "Instance", "Nvidia")):
        return BilledKind.MACHINE
    return BilledKind.OTHER

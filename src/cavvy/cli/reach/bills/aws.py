"""Reads AWS Cost and Usage Reports (CSV) and CUR 2.0 exports (CSV and Parquet).

Columns and types of lines: "Line item details" and "Line item columns", AWS Data Exports user
guide, https://docs.aws.amazon.com/cur/latest/userguide/Lineitem-columns.html and
table-dictionary-cur2-line-item.html, read on 2026-11-24. CUR 2.0 has the same columns in snake
case, and all tags in the map `resource_tags`, whose keys have the prefix `user_`
(table-dictionary-cur2-resource-tags.html). AWS lists a tag in both formats only after the tag was
activated as a cost allocation tag. LineItemId is unique in a partition ("Identity details").
"""

from collections.abc import Iterator

from cavvy.cli.reach.bills.rows import BillRow, amount, currency, moment, number, tags_of, text
from cavvy.costs.bills import BillCategory, BilledKind, BillLine

_COST = ("lineItem/UnblendedCost", "line_item_unblended_cost")
_SINCE = ("lineItem/UsageStartDate", "line_item_usage_start_date")
_UNTIL = ("lineItem/UsageEndDate", "line_item_usage_end_date")
_TYPE = ("lineItem/LineItemType", "line_item_line_item_type")
_RESOURCE = ("lineItem/ResourceId", "line_item_resource_id")
_USAGE_TYPE = ("lineItem/UsageType", "line_item_usage_type")
_QUANTITY = ("lineItem/UsageAmount", "line_item_usage_amount")
_CURRENCY = ("lineItem/CurrencyCode", "line_item_currency_code")
_ID = ("identity/LineItemId", "identity_line_item_id")
_INTERVAL = ("identity/TimeInterval", "identity_time_interval")
_TAG = ("resourceTags/user:cavvy:gang", "resource_tags_user_cavvy_gang")
_IN_MAP = ("user_cavvy:gang", "user_cavvy_gang", "user:cavvy:gang", "cavvy:gang")
REQUIRED = (_COST, _SINCE, _UNTIL, _TYPE, _RESOURCE)
_CATEGORIES = {
    "Tax": BillCategory.TAX,
    "Credit": BillCategory.CREDIT,
    "Refund": BillCategory.CREDIT,
    "Discount": BillCategory.DISCOUNT,
    "BundledDiscount": BillCategory.DISCOUNT,
    "EdpDiscount": BillCategory.DISCOUNT,
    "PrivateRateDiscount": BillCategory.DISCOUNT,
    "RiVolumeDiscount": BillCategory.DISCOUNT,
    "SppDiscount": BillCategory.DISCOUNT,
    "SavingsPlanNegation": BillCategory.DISCOUNT,
    "Fee": BillCategory.FEE,
    "RIFee": BillCategory.FEE,
    "SavingsPlanUpfrontFee": BillCategory.FEE,
    "SavingsPlanRecurringFee": BillCategory.FEE,
}
_MACHINES = ("BoxUsage", "SpotUsage", "DedicatedUsage", "HostUsage", "Reservation")


def read_row(row: BillRow, line: int) -> Iterator[BillLine]:
    """Yield the bill line of the row. Raises WrongBillValue."""
    kind = _kind(text(row, *_USAGE_TYPE))
    gang = text(row, *_TAG)
    if not gang:
        tags = tags_of(row.get("resource_tags"))
        gang = next((tags[name] for name in _IN_MAP if tags.get(name)), "")
    mark = text(row, *_ID)
    yield BillLine(
        number=line,
        resource=text(row, *_RESOURCE),
        gang=gang,
        kind=kind,
        category=_CATEGORIES.get(text(row, *_TYPE), BillCategory.USAGE),
        since=moment(row, *_SINCE),
        until=moment(row, *_UNTIL),
        hours=number(row, *_QUANTITY) if kind is BilledKind.MACHINE else None,
        amount=amount(row, *_COST),
        currency=currency(row, *_CURRENCY),
        identity=hash((mark, text(row, *_INTERVAL))) if mark else None,
    )


def _kind(usage_type: str) -> BilledKind:
    """Return the kind of a usage type such as USE1-BoxUsage:p5.48xlarge."""
    if any(part in usage_type for part in _MACHINES):
        return BilledKind.MACHINE
    if "EBS:" in usage_type:
        return BilledKind.DISK
    if "PublicIPv4" in usage_type or "ElasticIP" in usage_type:
        return BilledKind.ADDRESS
    if "Bytes" in usage_type:
        return BilledKind.TRAFFIC
    return BilledKind.OTHER

"""Fetches EC2's prices: on-demand prices from the Price List API, spot prices from EC2."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any

from cavvy.domain.units import HourlyRate, parse_rate
from cavvy.providers.aws.account import AwsAccount, Json

_PRICE_LISTS = "us-east-1"  # one of the regions that serve the Price List API
_CHUNK = 100  # maximum number of instance types in one request
LINUX = "Linux/UNIX"
# These filters leave one price per type: Linux, shared hardware, no licence.
_FILTERS = {
    "operatingSystem": "Linux",
    "tenancy": "Shared",
    "preInstalledSw": "NA",
    "capacitystatus": "Used",
    "marketoption": "OnDemand",
}
Spot = tuple[str, str, datetime, HourlyRate]  # type, zone, start time, price


async def fetch_on_demand(
    account: AwsAccount, region: str, types: Sequence[str]
) -> Mapping[str, HourlyRate]:
    """Return the on-demand prices by instance type. Up to 20 types are requested one by one; for
    more types, or if `types` is empty, the whole price list of the region is read.
    """
    base = [_filter(field, value) for field, value in {**_FILTERS, "regionCode": region}.items()]
    asked = (
        [[*base, _filter("instanceType", each)] for each in types]
        if 0 < len(types) <= 20
        else [base]
    )
    found: dict[str, HourlyRate] = {}
    for filters in asked:
        items = await account.pages(
            _PRICE_LISTS,
            "get_products",
            "PriceList",
            service="pricing",
            ServiceCode="AmazonEC2",
            Filters=filters,
        )
        for item in items:
            name, rate = read_product(json.loads(str(item)))
            if name and rate is not None:
                found[name] = rate
    return found


def read_product(item: Json) -> tuple[str, HourlyRate | None]:
    """The instance type and hourly price of an entry. The price is None if the entry has no hourly
    price in dollars.
    """
    name = str(item.get("product", {}).get("attributes", {}).get("instanceType", ""))
    for term in item.get("terms", {}).get("OnDemand", {}).values():
        for price in term.get("priceDimensions", {}).values():
            usd = Decimal(str(price.get("pricePerUnit", {}).get("USD", "0")))
            if price.get("unit") == "Hrs" and usd > 0:
                return name, parse_rate(usd)
    return name, None


async def fetch_spot(
    account: AwsAccount, region: str, types: Sequence[str], since: datetime, zone: str | None = None
) -> Sequence[Spot]:
    """Return the spot prices since a time, oldest first. For each type and zone, the first price is
    the one that was valid at that time.
    """
    chunks = [types[start : start + _CHUNK] for start in range(0, len(types), _CHUNK)]
    found: list[Spot] = []
    for chunk in chunks:
        arguments: dict[str, Any] = {
            "InstanceTypes": list(chunk),
            "ProductDescriptions": [LINUX],
            "StartTime": since,
        } | ({"AvailabilityZone": zone} if zone else {})
        for each in await account.items(region, "describe_spot_price_history", **arguments):
            rate = parse_rate(str(each["SpotPrice"]))
            found.append(
                (str(each["InstanceType"]), str(each["AvailabilityZone"]), each["Timestamp"], rate)
            )
    return sorted(found, key=lambda spot: (spot[2], spot[1], spot[0]))


def _filter(field: str, value: str) -> Mapping[str, str]:
    return {"Type": "TERM_MATCH", "Field": field, "Value": value}

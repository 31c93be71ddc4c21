"""Fetches EC2's prices with the account's credentials: on-demand and reserved prices from the Price
List API, spot prices from EC2's price history. Without credentials, AWS's public price files have
the prices on demand and the reserved ones, but they have several GB, so that they are read only if
the user names AWS.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

from cavvy.domain.events import ChargeKind
from cavvy.domain.offers import ExtraPrice, Offer, Purchase
from cavvy.domain.units import HourlyRate, Money, parse_rate, parse_usd
from cavvy.domain.values import Struct, replace
from cavvy.providers.aws import price_files
from cavvy.providers.aws.account import HOME, AwsAccount, Json
from cavvy.providers.base import ProviderError, Refused, wall_clock
from cavvy.providers.prices import NeedsLogin, PriceError, PriceQuery, PriceSource, ProviderPrices

_PRICE_LISTS = "us-east-1"  # one of the regions that serve the Price List API
_CHUNK = 100  # maximum number of instance types in one request
LINUX = "Linux/UNIX"
# AWS charges at least for this time of a Linux instance, a disk or an address
MINUTE = timedelta(minutes=1)
# These filters leave one price per type: Linux, shared hardware, no licence.
_FILTERS = {
    "operatingSystem": "Linux",
    "tenancy": "Shared",
    "preInstalledSw": "NA",
    "capacitystatus": "Used",
    "marketoption": "OnDemand",
}
_MONTHS = {"1yr": 12, "3yr": 36}
Spot = tuple[str, str, datetime, HourlyRate]  # type, zone, start time, price


class AwsPrices(Struct, frozen=True, kw_only=True):
    """Reads the prices of all regions of the account, one region at a time."""

    provider: str = "aws"
    title: str = (
        "AWS Price List API and EC2's spot price history, with your AWS credentials; without them, "
        "if you name aws, EC2's public price files"
    )
    files: str = price_files.BASE
    account: Callable[[], AwsAccount] = lambda: AwsAccount({})

    def fetch(self, query: PriceQuery) -> ProviderPrices:
        try:
            prices = asyncio.run(self._read(self.account(), query))
        except Refused as error:
            if not query.large:
                raise NeedsLogin(
                    f"{error}; `cavvy catalog refresh --provider aws` reads the public price files "
                    f"({price_files.SIZE})"
                ) from error
            prices = self._read_files(query)
        except ProviderError as error:
            raise PriceError(f"{error}; nothing was changed") from error
        if not prices.offers:
            raise PriceError("AWS returned no price of a known instance type; nothing was changed")
        return prices

    def _read_files(self, query: PriceQuery) -> ProviderPrices:
        """Read the public files. The catalog's spot prices stay."""
        offers: list[Offer] = []
        unknown: set[str] = set()
        for found in price_files.read_price_files(query, self.files):
            unknown |= found.rates.keys() - query.machines.keys()
            offers += _list_offers(query, found, "EC2 price file")
        return ProviderPrices(offers=offers, complete=False, unknown_types=len(unknown))

    async def _read(self, account: AwsAccount, query: PriceQuery) -> ProviderPrices:
        offers: list[Offer] = []
        unknown: set[str] = set()
        told = await account.items(HOME, "describe_regions")
        for region in sorted(str(each["RegionName"]) for each in told):
            query.progress(f"{self.title}: {len(offers):,} prices, {region}")
            rates, reserved = await fetch_listed(account, region)
            unknown |= rates.keys() - query.machines.keys()
            found = price_files.RegionPrices(region=region, rates=rates, reserved=reserved)
            offers += _list_offers(query, found, "AWS Price List API")
            offers += await self._read_spot(
                account, query, region, sorted(rates.keys() & query.machines.keys())
            )
        return ProviderPrices(offers=tuple(offers), unknown_types=len(unknown))

    async def _read_spot(
        self, account: AwsAccount, query: PriceQuery, region: str, types: list[str]
    ) -> list[Offer]:
        """Return a region's latest spot prices. Zones are named by their ids, which are the same in
        every account.
        """
        zones = await account.items(region, "describe_availability_zones")
        ids = {str(each["ZoneName"]): str(each["ZoneId"]) for each in zones}
        told = await fetch_spot(account, region, types, wall_clock())
        latest = {(name, zone): rate for name, zone, _, rate in told}
        return [
            _make(
                query,
                name,
                region,
                rate=rate,
                zone=ids[zone],
                purchase=Purchase.SPOT,
                source="EC2 spot price history",
            )
            for (name, zone), rate in sorted(latest.items())
            if zone in ids
        ]


SOURCE: PriceSource = AwsPrices()


async def fetch_on_demand(
    account: AwsAccount, region: str, types: Sequence[str]
) -> Mapping[str, HourlyRate]:
    """Return the on-demand prices by instance type. If `types` contains 1 to 20 types, request each
    type separately; otherwise read the region's whole price list.
    """
    found: dict[str, HourlyRate] = {}
    async for item in _products(account, region, types):
        name, rate = read_product(item)
        if name and rate is not None:
            found[name] = rate
    return found


async def fetch_listed(
    account: AwsAccount, region: str
) -> tuple[dict[str, HourlyRate], dict[tuple[str, int], HourlyRate]]:
    """Return all on-demand prices of a region by instance type, and all prices of reservations by
    instance type and months.
    """
    rates: dict[str, HourlyRate] = {}
    reserved: dict[tuple[str, int], HourlyRate] = {}
    async for item in _products(account, region, ()):
        name, rate = read_product(item)
        if name and rate is not None:
            rates[name] = rate
            reserved |= {(name, months): each for months, each in read_reserved(item).items()}
    return rates, reserved


async def _products(account: AwsAccount, region: str, types: Sequence[str]) -> AsyncIterator[Json]:
    """Yield the price list's entries for these instance types. If `types` is empty or has more than
    20 types, all entries are returned.
    """
    base = [_filter(field, value) for field, value in {**_FILTERS, "regionCode": region}.items()]
    asked = (
        [[*base, _filter("instanceType", each)] for each in types]
        if 0 < len(types) <= 20
        else [base]
    )
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
            yield json.loads(str(item))


async def fetch_extras(account: AwsAccount, region: str) -> Sequence[ExtraPrice]:
    """Return the prices of EBS volumes by type, and the price of a public IPv4 address that is in
    use. AWS bills volumes and addresses for at least a minute: https://aws.amazon.com/ebs/pricing/
    and https://aws.amazon.com/vpc/pricing/.
    """
    found: dict[tuple[ChargeKind, str], Money] = {}
    for service, filters in (
        ("AmazonEC2", {"productFamily": "Storage", "regionCode": region}),
        ("AmazonVPC", {"regionCode": region}),
    ):
        items = await account.pages(
            _PRICE_LISTS,
            "get_products",
            "PriceList",
            service="pricing",
            ServiceCode=service,
            Filters=[_filter(field, value) for field, value in filters.items()],
        )
        for item in items:
            extra = read_extra(json.loads(str(item)))
            if extra is not None:
                found.setdefault(extra[0], extra[1])
    return [
        ExtraPrice(kind=kind, name=name, price=price, minimum=MINUTE)
        for (kind, name), price in sorted(found.items())
    ]


def read_extra(item: Json) -> tuple[tuple[ChargeKind, str], Money] | None:
    """Return the kind, the name and the price of a disk or a public address. Returns None if the
    entry describes another product.
    """
    attributes = item.get("product", {}).get("attributes", {})
    disk = str(attributes.get("volumeApiName", ""))
    if disk:
        key, unit = (ChargeKind.DISK, disk), "GB-Mo"
    elif str(attributes.get("usagetype", "")).endswith("PublicIPv4:InUseAddress"):
        key, unit = (ChargeKind.ADDRESS, ""), "Hrs"
    else:
        return None
    terms = item.get("terms", {}).get("OnDemand", {}).values()
    prices = [usd for term in terms if (usd := _price(term, unit)) is not None]
    return (key, parse_usd(prices[0])) if prices else None


def read_product(item: Json) -> tuple[str, HourlyRate | None]:
    """Return the instance type and hourly price of an entry. The price is None if the entry has no
    hourly price in dollars.
    """
    name = str(item.get("product", {}).get("attributes", {}).get("instanceType", ""))
    terms = item.get("terms", {}).get("OnDemand", {}).values()
    return name, next((rate for term in terms if (rate := read_hourly(term)) is not None), None)


def read_reserved(item: Json) -> Mapping[int, HourlyRate]:
    """Return the hourly prices of standard reservations without upfront payment, by number of
    months. The reserved prices are comparable to the on-demand price, because reservations without
    upfront payment have no other costs.
    """
    found: dict[int, HourlyRate] = {}
    for term in item.get("terms", {}).get("Reserved", {}).values():
        how = term.get("termAttributes", {})
        months = _MONTHS.get(str(how.get("LeaseContractLength")))
        kind = (how.get("OfferingClass"), how.get("PurchaseOption"))
        rate = read_hourly(term)
        if months is not None and kind == ("standard", "No Upfront") and rate is not None:
            found[months] = rate
    return found


def read_hourly(term: Json) -> HourlyRate | None:
    """Return the hourly price in dollars that a term of the price list states, or None if the term
    states no price.
    """
    usd = _price(term, "Hrs")
    return None if usd is None else parse_rate(usd)


def _price(term: Json, unit: str) -> Decimal | None:
    """Return the first non-zero price in dollars for this unit."""
    for price in term.get("priceDimensions", {}).values():
        usd = Decimal(str(price.get("pricePerUnit", {}).get("USD", "0")))
        if price.get("unit") == unit and usd > 0:
            return usd
    return None


async def fetch_spot(
    account: AwsAccount, region: str, types: Sequence[str], since: datetime, zone: str | None = None
) -> Sequence[Spot]:
    """Return the spot prices since the time `since`, oldest first. The first price of each type and
    zone is the price that was valid at `since`.
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


def _make(query: PriceQuery, name: str, region: str, **fields: object) -> Offer:
    blank = replace(query.machines[name], zone=None, purchase=Purchase.ON_DEMAND, capacity=None)
    blank = replace(blank, region=region, as_of=query.today, term_months=0)
    return replace(blank, **fields)  # type: ignore[arg-type]  # fields of Offer


def _list_offers(
    query: PriceQuery, found: price_files.RegionPrices, source: str
) -> Iterator[Offer]:
    """Yield the offers of a region's machines on demand and reserved."""
    for name in sorted(found.rates.keys() & query.machines.keys()):
        yield _make(query, name, found.region, rate=found.rates[name], source=source)
    for (name, months), rate in sorted(found.reserved.items()):
        if name in query.machines:
            yield _make(
                query,
                name,
                found.region,
                rate=rate,
                purchase=Purchase.RESERVED,
                term_months=months,
                source=f"{source}, standard reservation without upfront payment",
            )

"""Reads Azure's Retail Prices API: public JSON, in pages, without credentials.

https://learn.microsoft.com/rest/api/cost-management/retail-prices/azure-retail-prices

Azure bills each disk at the next larger size that it sells:
https://learn.microsoft.com/azure/virtual-machines/disks-types. The prices of disks do not include
Azure's charges for disk operations and disk mounts.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import date
from decimal import Decimal
from urllib.parse import urlencode

from cavvy.domain.events import ChargeKind
from cavvy.domain.offers import ExtraPrice, Offer, Purchase
from cavvy.domain.tasks import Scalar
from cavvy.domain.units import HourlyRate, parse_rate, parse_usd
from cavvy.domain.values import Struct, replace
from cavvy.http_client import HttpClient, is_same_server
from cavvy.providers.prices import PriceError, PriceQuery, PriceSource, ProviderPrices, read_page

_FILTER = "serviceName eq 'Virtual Machines'"
_TERM_MONTHS = {"1 Year": 12, "3 Years": 36, "5 Years": 60}
_HOURS_PER_MONTH = 730  # Azure's prices assume a year of 8,760 hours
_MOST_PAGES = (
    # maximum number of pages; the list has a few hundred, and an endless list must not block the
    # refresh
    5000
)
_MOST_BYTES = 32 << 20  # maximum bytes of one page

Item = Mapping[str, object]
_DISK = re.compile(r"([EPS])(\d+) LRS Disk")
_TYPES = {"E": "StandardSSD_LRS", "P": "Premium_LRS", "S": "Standard_LRS"}
# the number in a size's name -> GiB
_SIZES_GIB = {
    1: 4,
    2: 8,
    3: 16,
    4: 32,
    6: 64,
    10: 128,
    15: 256,
    20: 512,
    30: 1024,
    40: 2048,
    50: 4096,
    60: 8192,
    70: 16384,
    80: 32767,
}
_ADDRESS = "Standard IPv4 Static Public IP"


class AzurePrices(Struct, frozen=True, kw_only=True):
    """Reads Azure's price list page by page. Requests a page again after a temporary error."""

    provider: str = "azure"
    title: str = "Azure Retail Prices API"
    base: str = "https://prices.azure.com"
    timeout_s: float = 60
    tries: int = 5
    only: str = ""  # an additional condition for the filter; "" for all machines

    def fetch(self, query: PriceQuery) -> ProviderPrices:
        prices = self._collect(query)
        if not prices.offers:
            raise PriceError(
                f"{self.base} answered, but with no price of a known instance type; nothing was "
                "changed"
            )
        return prices

    def find(self, query: PriceQuery) -> Sequence[Offer]:
        """Return the offers in Azure's list that match the query. Raises PriceError."""
        return self._collect(query).offers

    def list_items(self, condition: str, query: PriceQuery) -> Iterator[Item]:
        """Return the items of the list that match a filter. Raises PriceError."""
        return self._items(query, condition)

    def _collect(self, query: PriceQuery) -> ProviderPrices:
        offers: dict[str, Offer] = {}
        unknown: set[str] = set()
        only = f"{_FILTER} and {self.only}" if self.only else _FILTER
        for item in self._items(query, only):
            offer = _read_item(item, query.machines, query.today)
            if offer is None:
                if _is_sold_by_the_hour(item) and item.get("armSkuName") not in query.machines:
                    unknown.add(str(item.get("armSkuName")))
                continue
            # When one meter replaces another, the list contains both prices; the lower one is
            # valid.
            known = offers.get(offer.key)
            if known is None or offer.rate < known.rate:
                offers[offer.key] = offer
        return ProviderPrices(
            offers=_without_placeholders(offers),
            unknown_types=len(unknown),
        )

    def _items(self, query: PriceQuery, condition: str) -> Iterator[Item]:
        parameters = {
            "api-version": "2023-01-01-preview",
            "currencyCode": "USD",
            "$filter": condition,
        }
        url = f"{self.base}/api/retail/prices?{urlencode(parameters)}"
        seen = 0
        client = HttpClient(idle_s=self.timeout_s, most_bytes=_MOST_BYTES)
        for page in range(1, _MOST_PAGES + 1):
            answer = read_page(client, url, query.pause, tries=self.tries, name=self.base)
            items, following = answer.get("Items"), answer.get("NextPageLink")
            if not isinstance(items, list) or not isinstance(following, str | None):
                raise PriceError(
                    f"page {page} of {self.base} is not in the documented form; nothing was changed"
                )
            yield from (item for item in items if isinstance(item, dict))
            seen += len(items)
            query.progress(f"{self.title}: {seen:,} prices in {page} pages")
            if not following:
                return
            if not is_same_server(following, self.base):
                raise PriceError(
                    f"page {page} of {self.base} continues on another server ({following}); "
                    "nothing was changed"
                )
            url = following.replace(" ", "%20")  # the link may repeat the filter without escapes
        raise PriceError(
            f"the list of {self.base} has more than {_MOST_PAGES} pages; nothing was changed"
        )


SOURCE: PriceSource = AzurePrices()


def _is_sold_by_the_hour(item: Item) -> bool:
    """Return whether an item is a Linux machine with an hourly price; the list also contains
    Windows licences, old services and development offers.
    """
    product, sku = str(item.get("productName")), str(item.get("skuName"))
    return (
        item.get("currencyCode") == "USD"
        and item.get("unitOfMeasure") == "1 Hour"
        and item.get("type") in ("Consumption", "Reservation")
        and not any(
            word in product
            for word in ("Windows", "Cloud Services", "CloudServices", "Dedicated Host")
        )
        and "Low Priority" not in sku
        and "Expired" not in sku
    )


def _read_item(item: Item, machines: Mapping[str, Offer], today: date) -> Offer | None:
    """Return the offer for an item of the list, or None if the item is not the hourly price of a
    known machine.
    """
    region = item.get("armRegionName")
    machine = machines.get(str(item.get("armSkuName")))
    price = item.get("retailPrice")
    if (
        machine is None
        or not region
        or not isinstance(price, int | float)
        or not _is_sold_by_the_hour(item)
    ):
        return None
    months = 0
    purchase = Purchase.SPOT if "Spot" in str(item.get("skuName")) else Purchase.ON_DEMAND
    rate = parse_rate(Decimal(str(price))) if price > 0 else HourlyRate(0)
    if item.get("type") == "Reservation":
        months = _TERM_MONTHS.get(str(item.get("reservationTerm")), 0)
        purchase = Purchase.RESERVED
        # A reservation's price covers its whole term.
        rate = (
            HourlyRate(round(rate.micros_per_hour / (months * _HOURS_PER_MONTH)))
            if months
            else HourlyRate(0)
        )
    if not rate.micros_per_hour:
        return None
    return replace(
        machine,
        region=str(region),
        zone=None,
        purchase=purchase,
        rate=rate,
        term_months=months,
        source="Azure Retail Prices API",
        as_of=today,
    )


def _without_placeholders(offers: Mapping[str, Offer]) -> tuple[Offer, ...]:
    """Omit spot offers whose price is not lower than the on-demand price: such a price is a
    placeholder, and means that no spot capacity exists.
    """
    usual = {
        (offer.region, offer.instance_type): offer.rate
        for offer in offers.values()
        if offer.purchase is Purchase.ON_DEMAND
    }
    return tuple(
        offer
        for offer in offers.values()
        if offer.purchase is not Purchase.SPOT
        or (offer.region, offer.instance_type) not in usual
        or offer.rate < usual[offer.region, offer.instance_type]
    )


def make_filter(region: str) -> str:
    """Return the filter that selects the prices of a region."""
    return (
        f"armRegionName eq '{region}' and priceType eq 'Consumption' and "
        "((serviceName eq 'Storage' and contains(meterName, 'LRS Disk')) or "
        f"(serviceName eq 'Virtual Network' and meterName eq '{_ADDRESS}'))"
    )


def read_extras(
    items: Iterable[Item], settings: Mapping[str, Scalar], today: date
) -> tuple[ExtraPrice, ...]:
    """Return the prices of disks by type and size, and the price of an address. Each price also
    states the amount that a node uses by default. If the list contains several prices for one
    meter, such as an old and a new price, use the highest price, so that no bill exceeds its
    estimate.
    """
    kind, size = str(settings["disk_type"]), int(settings["disk_gib"])
    found: dict[tuple[ChargeKind, str, int], ExtraPrice] = {}
    for item in items:
        price = _read(item)
        if price is None:
            continue
        if price.kind is ChargeKind.ADDRESS:
            price = replace(price, usual=int(bool(settings["public_ip"])))
        elif price.name == kind:
            price = replace(price, usual=size, least=size)
        key = (price.kind, price.name, price.up_to_gib)
        if key in found and found[key].price.micros >= price.price.micros:
            continue
        found[key] = replace(price, source="Azure Retail Prices API", as_of=today)
    return tuple(found[key] for key in sorted(found))


def _read(item: Item) -> ExtraPrice | None:
    """Return the price of a disk or an address, or None if the item is neither."""
    meter, unit, usd = (item.get(each) for each in ("meterName", "unitOfMeasure", "retailPrice"))
    if item.get("currencyCode") != "USD" or not isinstance(usd, int | float) or usd <= 0:
        return None
    price = parse_usd(Decimal(str(usd)))
    disk = _DISK.fullmatch(str(meter))
    if disk is not None and unit == "1/Month" and int(disk[2]) in _SIZES_GIB:
        name, size = _TYPES[disk[1]], _SIZES_GIB[int(disk[2])]
        return ExtraPrice(kind=ChargeKind.DISK, name=name, price=price, up_to_gib=size)
    if meter == _ADDRESS and unit == "1 Hour":
        return ExtraPrice(kind=ChargeKind.ADDRESS, price=price)
    return None

"""Reads the prices of disks and external addresses, and the live prices of machines with GPUs, for
the offers of the provider.

Google bills disks by GiB and month: https://cloud.google.com/compute/disks-image-pricing. Google
bills each external address by the hour, at a different price for spot machines:
https://cloud.google.com/vpc/network-pricing#ipaddress. Hyperdisk's IOPS and throughput above each
disk's included amount are not part of the prices.
"""

import re
from collections.abc import Iterable, Mapping
from datetime import date
from decimal import Decimal

from cavvy.domain.events import ChargeKind
from cavvy.domain.offers import ExtraPrice, Offer, Purchase
from cavvy.domain.tasks import Scalar
from cavvy.domain.units import parse_usd
from cavvy.domain.values import Struct, field, replace
from cavvy.providers.gcp.instance import find_disk_type
from cavvy.providers.gcp.price_list import (
    HOURS_PER_MONTH,
    Sku,
    add_rate,
    price_machine,
    read_price,
    read_unit,
)

_SOURCE = "Google's Cloud Billing Catalog API"
_DISK = re.compile(
    r"(?P<name>Balanced PD|SSD backed PD|Storage PD|Hyperdisk Balanced) Capacity(?: in .*)?"
)
_DISKS = {
    "Balanced PD": "pd-balanced",
    "SSD backed PD": "pd-ssd",
    "Storage PD": "pd-standard",
    "Hyperdisk Balanced": "hyperdisk-balanced",
}
_ADDRESS = re.compile(
    r"External IP Charge on a (?P<kind>Standard|Spot Preemptible|Preemptible) VM(?: in .*)?"
)
# unit of a price -> how often it is billed for a GiB in an average month, or for an address in 1 h
_DISK_UNITS: Mapping[str, int] = {"GiBy.mo": 1, "GiBy.h": HOURS_PER_MONTH}
_ADDRESS_UNITS: Mapping[str, int] = {"h": 1}
_EVERYWHERE = "global"  # Google's name of the region of prices that are the same in all regions

# (region, way of paying, name of the type of disk or "")
_Key = tuple[str, ChargeKind, str]


class LivePrices(Struct):
    """Prices from Google's price list. `extras` contains the prices of disks and addresses by
    region. The price of each address is stored under the purchase option of the machine that uses
    the address.
    """

    today: date
    rates: dict[tuple[str, Purchase, int], dict[tuple[str, str], Decimal]] = field(
        default_factory=dict
    )
    extras: dict[_Key, ExtraPrice] = field(default_factory=dict)

    def price(self, offers: Iterable[Offer]) -> list[Offer]:
        """Return the offers with Google's live prices. Offers without a price in the list are
        unchanged.
        """
        found: dict[tuple[str, str, Purchase], Offer] = {}
        rows = list(offers)
        for machine in {each.instance_type: each for each in rows}.values():
            for offer in price_machine(machine, self.rates, self.today):
                if not offer.term_months:
                    found[offer.instance_type, offer.region, offer.purchase] = offer
        return [
            replace(each, rate=live.rate, source=live.source, as_of=live.as_of)
            if (live := found.get((each.instance_type, each.region, each.purchase)))
            else each
            for each in rows
        ]

    def list_extras(self, offer: Offer, settings: Mapping[str, Scalar]) -> tuple[ExtraPrice, ...]:
        """Return the items that Google bills in addition to the machine, with the usual amounts for
        a node.
        """
        usual = find_disk_type(offer, settings)
        found = []
        for name in _DISKS.values():
            price = self._find(offer.region, ChargeKind.DISK, name)
            if price is not None:
                gib = int(settings["disk_gib"]) if name == usual else 0
                found.append(replace(price, usual=gib))
        kind = Purchase.SPOT if offer.purchase is Purchase.SPOT else Purchase.ON_DEMAND
        address = self._find(offer.region, ChargeKind.ADDRESS, kind)
        if address is not None and settings["external_address"]:
            found.append(replace(address, name="", usual=1))
        return tuple(found)

    def _find(self, region: str, kind: ChargeKind, name: str) -> ExtraPrice | None:
        return self.extras.get((region, kind, name)) or self.extras.get((_EVERYWHERE, kind, name))


def read_live(skus: Iterable[Sku], today: date) -> LivePrices:
    """Read the prices of SKUs. Raises KeyError or TypeError if Google has changed the format of the
    list."""
    found = LivePrices(today)
    for sku in skus:
        add_rate(found.rates, sku)
        extra = _read_extra(sku)
        if extra is None:
            continue
        extra = replace(extra, source=_SOURCE, as_of=today)
        regions = sku.get("serviceRegions")
        for region in regions if isinstance(regions, list) else ():
            found.extras[str(region), extra.kind, extra.name] = extra
    return found


def _read_extra(sku: Sku) -> ExtraPrice | None:
    """Return the price of a disk or an address, or None if the SKU has a different purpose or an
    unknown unit.
    """
    description, category = str(sku.get("description") or ""), sku.get("category")
    usage = category.get("usageType") if isinstance(category, dict) else ""
    disk, address = _DISK.fullmatch(description), _ADDRESS.fullmatch(description)
    if usage not in ("OnDemand", "Preemptible") or not (disk or address):
        return None
    dollars = read_price(sku)
    times = (_DISK_UNITS if disk else _ADDRESS_UNITS).get(read_unit(sku))
    if not dollars or times is None:
        return None
    price = parse_usd(dollars * times)
    if disk:
        return ExtraPrice(kind=ChargeKind.DISK, name=_DISKS[disk["name"]], price=price)
    assert address is not None
    kind = Purchase.ON_DEMAND if address["kind"] == "Standard" else Purchase.SPOT
    return ExtraPrice(kind=ChargeKind.ADDRESS, name=str(kind), price=price)

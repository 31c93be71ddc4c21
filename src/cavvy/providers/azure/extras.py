"""Reads the prices of managed disks and public addresses in Azure's public price list.

Azure bills each disk at the next larger size that it sells:
https://learn.microsoft.com/azure/virtual-machines/disks-types. The prices do not include Azure's
charges for disk operations and disk mounts.
"""

import re
from collections.abc import Iterable, Mapping
from datetime import date
from decimal import Decimal

from cavvy.domain.events import ChargeKind
from cavvy.domain.offers import ExtraPrice
from cavvy.domain.tasks import Scalar
from cavvy.domain.units import parse_usd
from cavvy.domain.values import replace
from cavvy.providers.azure.price_list import Item

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

"""Combines the catalog's prices, one for each region, with the types of slices that the TPU API
lists for each zone. An offer is one host of a slice.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta

from cavvy.catalog.tpu_slices import find_slice
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.values import replace
from cavvy.providers.base import ProviderContext
from cavvy.providers.tpu.api import TpuApi
from cavvy.providers.vm.keys import list_setting
from cavvy.providers.vm.regions import RegionalMarket, ask_regions

# Slices that Compute Engine rents too are in the catalog as offers of `gcp`.
_CATALOGS = ("gcp", "tpu")
_SOLD = (Purchase.ON_DEMAND, Purchase.SPOT)
# the size of the boot disk, which cannot be changed:
# https://cloud.google.com/tpu/docs/attach-durable-block-storage
_DISK_GIB = 100


class TpuMarket(RegionalMarket):
    """Reads and caches offers."""

    age, again = timedelta(hours=12), timedelta(minutes=5)

    def __init__(self, api: TpuApi, context: ProviderContext) -> None:
        super().__init__(context)
        self._api = api

    async def _join(self) -> Sequence[Offer]:
        listed = [await asyncio.to_thread(self._list_prices, each) for each in _CATALOGS]
        rows = [row for each in listed for row in each]
        prices: dict[tuple[str, str], list[Offer]] = {}
        for row in rows:
            kind = find_slice(row.instance_type) if row.purchase in _SOLD else None
            if kind is not None:
                prices.setdefault((row.region, kind.type), []).append(row)
        priced = {region for region, _ in prices}
        zones = [each for each in await self._zones() if _region(each) in priced]
        found, self.silent = await ask_regions(zones, self._types)
        return [
            _make_offer(row, zone)
            for zone, name in found
            for row in prices.get((_region(zone), name), ())
        ]

    async def _zones(self) -> Sequence[str]:
        """Return the zones that have TPUs and that the settings select."""
        regions = list_setting(self._settings, "regions")
        zones = list_setting(self._settings, "zones")
        told, _ = await self._api.list("locations", "locations")
        return [
            zone
            for zone in sorted(str(each["locationId"]) for each in told)
            if (not zones or zone in zones) and (not regions or _region(zone) in regions)
        ]

    async def _types(self, zone: str) -> Sequence[tuple[str, str]]:
        """Return the types of slices that a zone has, each with the zone."""
        told, _ = await self._api.list(f"locations/{zone}/acceleratorTypes", "acceleratorTypes")
        return [(zone, name) for name in _names(told)]


def _names(told: Sequence[Mapping[str, object]]) -> Iterator[str]:
    for each in dict.fromkeys(str(each["type"]) for each in told):
        known = find_slice(each)
        if known is not None:
            yield known.type


def _region(zone: str) -> str:
    return zone.rpartition("-")[0]


def _make_offer(price: Offer, zone: str) -> Offer:
    """Return the offer of one host."""
    return replace(price, provider="tpu", zone=zone, disk_gib=_DISK_GIB, architecture="x86_64")

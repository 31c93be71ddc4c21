"""Combines the profiles that the VPC API lists with IBM's price list. If the price list contains
only prices for the parts of a profile, the catalog's price is used.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import product

from cavvy.catalog.accelerators import KnownAccelerator, identify
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.units import HourlyRate
from cavvy.providers.base import ProviderContext
from cavvy.providers.ibm import bare_metal
from cavvy.providers.ibm.api import IbmApi
from cavvy.providers.ibm.price_list import IbmPrices, ProfilePrices
from cavvy.providers.vm.keys import list_setting
from cavvy.providers.vm.regions import RegionalMarket, ask_regions
from cavvy.providers.vm.rest import Json

_PRICES_AGE = timedelta(days=1)
_CLASSES = {Purchase.ON_DEMAND: "standard", Purchase.SPOT: "spot"}
_ARCHITECTURES = {"amd64": "x86_64"}


class IbmMarket(RegionalMarket):
    """Reads and caches offers."""

    def __init__(self, api: IbmApi, context: ProviderContext) -> None:
        super().__init__(context)
        self._api = api
        self._list = IbmPrices(context.settings)
        self.close = self._list.close
        self.regions = list_setting(context.settings, "regions")
        self.bare_metal = list_setting(context.settings, "bare_metal_profiles")
        self._prices: tuple[datetime, Sequence[str], ProfilePrices] | None = None
        self.unpriced: Sequence[str] = ()  # profiles that have no price in some region
        self.unknown: Sequence[str] = ()  # models of GPUs that are not in the catalog

    async def _join(self) -> Sequence[Offer]:
        told, self.silent = await ask_regions(self.regions, self._list_profiles)
        prices = await self._read_prices(sorted({str(profile["name"]) for _, profile in told}))
        known = await asyncio.to_thread(self._list_prices, "ibm")
        stored = {(each.instance_type, each.region, each.purchase): each.rate for each in known}
        found: list[Offer] = []
        unpriced, unknown = set(), set()
        for region, profile in told:
            model, accelerator = _identify(profile)
            if model and accelerator is None:
                unknown.add(model)
                continue
            offers = list(self._make_offers(region, profile, accelerator, {**stored, **prices}))
            metal = bare_metal.is_bare_metal(str(profile["name"]))
            if metal:
                offers = [bare_metal.to_server(each, profile) for each in offers]
            found += offers
            if not offers and (model or metal):
                unpriced.add(f"{profile['name']} ({region})")
        self.unpriced, self.unknown = sorted(unpriced), sorted(unknown)
        return found

    async def _list_profiles(self, region: str) -> Sequence[tuple[str, Json]]:
        """Return the profiles to offer in a region, as pairs (region, profile). Profiles of bare
        metal servers are converted to the form of instances' profiles.
        """
        plain = list_setting(self._settings, "cpu_profiles")
        listed = await self._api.list(region, "/instance/profiles", "profiles")
        wanted = [
            each for each in listed if _read_fixed(each.get("gpu_count")) or each["name"] in plain
        ]
        if self.bare_metal:
            servers = await self._api.list(region, "/bare_metal_server/profiles", "profiles")
            named = [each for each in servers if each["name"] in self.bare_metal]
            wanted += map(bare_metal.to_instance_profile, named)
        return [(region, each) for each in wanted]

    async def _read_prices(self, profiles: Sequence[str]) -> ProfilePrices:
        known = self._prices
        if known is None or self._now() - known[0] >= _PRICES_AGE or known[1] != profiles:
            known = self._prices = self._now(), profiles, await self._list.read(profiles)
        return known[2]

    def _make_offers(
        self,
        region: str,
        profile: Json,
        known: KnownAccelerator | None,
        prices: Mapping[tuple[str, str, Purchase], HourlyRate],
    ) -> Iterator[Offer]:
        name, gpus = str(profile["name"]), _read_fixed(profile.get("gpu_count")) if known else 0
        classes = profile.get("availability_class") or {}
        allowed = classes.get("values") or [classes.get("value") or "standard"]
        architecture = str(profile["vcpu_architecture"]["value"])
        for purchase, zone in product(_CLASSES, profile["zones"]):
            rate = prices.get((name, region, purchase))
            if rate is None or _CLASSES[purchase] not in allowed:
                continue
            yield Offer(
                provider="ibm",
                region=region,
                zone=str(zone["name"]),
                instance_type=name,
                accelerator=known.accelerator.name if known else None,
                accelerator_count=gpus,
                accelerator_memory_mib=(known.memory_mib or 0) if known else 0,
                vcpus=_read_fixed(profile["vcpu_count"]),
                memory_mib=_read_fixed(profile["memory"]) * 1024,
                network_mbps=_read_fixed(profile.get("bandwidth")) or None,
                purchase=purchase,
                rate=rate,
                architecture=_ARCHITECTURES.get(architecture, architecture),
                source="IBM's VPC API, IBM's Global Catalog, and Cavvy's catalog",
                as_of=self._now().date(),
            )


def _read_fixed(field: Json) -> int:
    """Return the value of a profile's field, or 0 if the field is missing or has several values."""
    return int((field or {}).get("value") or 0)


def _identify(profile: Json) -> tuple[str, KnownAccelerator | None]:
    """Return IBM's name of the profile's GPU, and the catalog's entry for this GPU. The name is ""
    if the profile has no GPU; the entry is None if the GPU is not in the catalog."""
    gpus = _read_fixed(profile.get("gpu_count"))
    if not gpus:
        return "", None
    models = (profile.get("gpu_model") or {}).get("values") or ["a GPU without a name"]
    # the memory is that of all GPUs
    memory_mib = _read_fixed(profile.get("gpu_memory")) * 1024 // gpus
    return str(models[0]), identify(str(models[0]), memory_mib or None)

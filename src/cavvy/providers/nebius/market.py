"""Joins the presets that Nebius lists for each project with the catalog's prices."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from decimal import Decimal

from cavvy.domain.events import ChargeKind
from cavvy.domain.offers import ExtraPrice, Offer, Purchase
from cavvy.domain.tasks import Scalar
from cavvy.domain.units import parse_usd
from cavvy.providers.base import Refused
from cavvy.providers.nebius.api import NebiusApi
from cavvy.providers.vm.keys import list_setting
from cavvy.providers.vm.rest import Json

ListPrices = Callable[[str], Sequence[Offer]]

USUAL_DISK = "network_ssd"  # the type of a boot disk, unless the task requests another
LEAST_GIB = 50  # the smallest boot disk that Cavvy requests
_AGE = timedelta(hours=1)


class NebiusMarket:
    """Reads and caches offers. `list_prices` returns the catalog's offers of a provider. Methods
    raise CloudFault and Refused.
    """

    def __init__(
        self,
        api: NebiusApi,
        settings: Mapping[str, Scalar],
        list_prices: ListPrices,
        now: Callable[[], datetime],
    ) -> None:
        self._api, self._settings, self._now = api, settings, now
        self._list_prices = list_prices
        self._offers: tuple[datetime, Sequence[Offer]] | None = None
        self._regions: dict[str, str] = {}  # by project
        self.unpriced: Sequence[str] = ()  # GPU presets without a price in the catalog

    def project_ids(self) -> Sequence[str]:
        """The projects of the settings. Raises Refused."""
        found = list_setting(self._settings, "projects")
        if not found:
            raise Refused(
                "[providers.nebius] projects: not set; name the ids of one project for each region "
                "to use, such as project-e00abc (the console shows them)"
            )
        return found

    async def project_of(self, region: str) -> str:
        """The project in the region."""
        regions = await self._read_regions()
        for project, each in regions.items():
            if each == region:
                return project
        raise Refused(f"[providers.nebius] projects: none of them is in the region {region}")

    async def offers(self) -> Sequence[Offer]:
        """The offers of all projects."""
        if self._offers is None or self._now() - self._offers[0] >= _AGE:
            self._offers = self._now(), await self._join()
        return self._offers[1]

    async def _read_regions(self) -> Mapping[str, str]:
        for project in self.project_ids():
            if project in self._regions:
                continue
            told = await self._api.read("iam.ProjectService/Get", {"id": project})
            region = str(told["spec"].get("region") or "")
            if region in self._regions.values():
                raise Refused(
                    f"[providers.nebius] projects: several projects are in the region {region}; "
                    "name one project for each region"
                )
            self._regions[project] = region
        return self._regions

    async def _join(self) -> Sequence[Offer]:
        prices: dict[tuple[str, str], list[Offer]] = {}
        for each in await asyncio.to_thread(self._list_prices, "nebius"):
            if each.purchase in (Purchase.ON_DEMAND, Purchase.SPOT):
                prices.setdefault((each.region, each.instance_type), []).append(each)
        found: list[Offer] = []
        unpriced = set()
        for project, region in (await self._read_regions()).items():
            body = {"parentId": project, "pageSize": 100}
            for platform in await self._api.list("compute.PlatformService/List", body):
                for name, gpus in _presets(platform):
                    rows = prices.get((region, name), [])
                    spot = bool(platform["status"].get("allowedForPreemptibles"))
                    found += [row for row in rows if spot or row.purchase is not Purchase.SPOT]
                    if gpus and not rows:
                        unpriced.add(f"{name} in {region}")
        self.unpriced = sorted(unpriced)
        return [replace(each, extras=self._extras()) for each in found]

    def _extras(self) -> tuple[ExtraPrice, ...]:
        """The price of a boot disk, if the settings contain it."""
        price = parse_usd(Decimal(str(self._settings.get("disk_usd_gib_month") or 0)))
        if not price.micros:
            return ()
        disk = ExtraPrice(
            kind=ChargeKind.DISK,
            name=USUAL_DISK,
            price=price,
            usual=int(self._settings["disk_gib"]),
            least=LEAST_GIB,
            source="the setting `disk_usd_gib_month`",
            as_of=self._now().date(),
        )
        return (disk,)


def _presets(platform: Json) -> Sequence[tuple[str, int]]:
    """The catalog's names of a platform's presets, each with its number of GPUs."""
    name, presets = platform["name"], platform["spec"].get("presets") or []
    return [
        (f"{name}_{each['name']}", int((each.get("resources") or {}).get("gpuCount") or 0))
        for each in presets
    ]

"""Combines the presets that Nebius lists for each project with the catalog's prices."""

import asyncio
from collections.abc import Sequence
from decimal import Decimal

from cavvy.domain.events import ChargeKind
from cavvy.domain.offers import ExtraPrice, Offer, Purchase
from cavvy.domain.units import parse_usd
from cavvy.domain.values import replace
from cavvy.providers.base import ProviderContext, Refused
from cavvy.providers.nebius.api import NebiusApi
from cavvy.providers.vm.cloud import CloudFault
from cavvy.providers.vm.keys import list_setting
from cavvy.providers.vm.regions import RegionalMarket, ask_regions
from cavvy.providers.vm.rest import Json

USUAL_DISK = "network_ssd"  # the type of a boot disk, unless the task requests another
LEAST_GIB = 50  # the smallest boot disk that Cavvy requests


class NebiusMarket(RegionalMarket):
    """Reads and caches offers. `list_prices` returns the catalog's offers of a provider. Methods
    raise CloudFault and Refused.
    """

    def __init__(self, api: NebiusApi, context: ProviderContext) -> None:
        super().__init__(context)
        self._api = api
        self._regions: dict[str, str] = {}  # by project
        self.unpriced: Sequence[str] = ()  # GPU presets without a price in the catalog

    def project_ids(self) -> Sequence[str]:
        """Return the projects that the settings name. Raises Refused."""
        found = list_setting(self._settings, "projects")
        if not found:
            raise Refused(
                "[providers.nebius] projects: not set; for each region to use, name the id of one "
                "project, such as project-e00abc (the console shows the ids)"
            )
        return found

    async def project_of(self, region: str) -> str:
        """Return the project in the region."""
        failed: CloudFault | Refused | None = None
        for project in self.project_ids():
            try:
                if await self._read_region(project) == region:
                    return project
            except (CloudFault, Refused) as fault:  # another project may be in the region
                failed = failed or fault
        raise failed or Refused(
            f"[providers.nebius] projects: none of the projects is in the region {region}"
        )

    def region_of(self, project: str) -> str:
        """Return the region of a project, or "" if the region was not read yet."""
        return self._regions.get(project, "")

    async def _read_region(self, project: str) -> str:
        if project not in self._regions:
            told = await self._api.read("iam.ProjectService/Get", {"id": project})
            self._regions[project] = str(told["spec"].get("region") or "")
        return self._regions[project]

    async def _platforms(self) -> Sequence[tuple[str, Json]]:
        """Return the platforms of all projects that answer, each with its region."""

        async def read(project: str) -> Sequence[tuple[str, Json]]:
            region, body = await self._read_region(project), {"parentId": project, "pageSize": 100}
            told = await self._api.list("compute.PlatformService/List", body)
            return [(region, each) for each in told]

        found, self.silent = await ask_regions(self.project_ids(), read)
        regions = [self._regions[each] for each in self.project_ids() if each in self._regions]
        for region in regions:
            if regions.count(region) > 1:
                raise Refused(
                    f"[providers.nebius] projects: several projects are in the region {region}; "
                    "name one project for each region"
                )
        return found

    async def _join(self) -> Sequence[Offer]:
        prices: dict[tuple[str, str], list[Offer]] = {}
        for each in await asyncio.to_thread(self._list_prices, "nebius"):
            if each.purchase in (Purchase.ON_DEMAND, Purchase.SPOT):
                prices.setdefault((each.region, each.instance_type), []).append(each)
        found: list[Offer] = []
        unpriced = set()
        for region, platform in await self._platforms():
            for name, gpus in _presets(platform):
                rows = prices.get((region, name), [])
                spot = bool(platform["status"].get("allowedForPreemptibles"))
                found += [row for row in rows if spot or row.purchase is not Purchase.SPOT]
                if gpus and not rows:
                    unpriced.add(f"{name} in {region}")
        self.unpriced = sorted(unpriced)
        return [replace(each, extras=self._extras()) for each in found]

    def _extras(self) -> tuple[ExtraPrice, ...]:
        """Return the price of a boot disk, if the settings contain this price."""
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
    """Return the catalog's names of a platform's presets, each with its number of GPUs."""
    name, presets = platform["name"], platform["spec"].get("presets") or []
    return [
        (f"{name}_{each['name']}", int((each.get("resources") or {}).get("gpuCount") or 0))
        for each in presets
    ]

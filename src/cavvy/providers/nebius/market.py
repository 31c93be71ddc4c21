"""Combines the presets that Nebius lists for each project with the catalog's prices.

Finds the subnet, the image and the GPU cluster of a machine, from the settings or from the
defaults.
"""

import asyncio
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal

from cavvy.domain.events import ChargeKind
from cavvy.domain.offers import ExtraPrice, Offer, Purchase
from cavvy.domain.tasks import Scalar
from cavvy.domain.units import parse_usd
from cavvy.domain.values import replace
from cavvy.providers.base import GangSpec, ProviderContext, Refused
from cavvy.providers.nebius.api import NebiusApi
from cavvy.providers.vm.cloud import CloudFault
from cavvy.providers.vm.keys import list_setting
from cavvy.providers.vm.regions import RegionalMarket, ask_regions
from cavvy.providers.vm.rest import Json

USUAL_DISK = "network_ssd"  # the type of a boot disk, unless the task requests another
LEAST_GIB = 50  # the smallest boot disk that Cavvy requests

# Nebius's public images: https://docs.nebius.com/compute/storage/boot-disk-images
_CUDA = re.compile(r"ubuntu(\d+)\.(\d+)-cuda(\d+)(?:\.(\d+))?")
_PLAIN = re.compile(r"ubuntu(\d+)\.(\d+)-driverless")


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


class NebiusPlaces:
    """Finds and caches subnets and images. Methods raise CloudFault and Refused."""

    def __init__(self, api: NebiusApi, settings: Mapping[str, Scalar]) -> None:
        self._api, self._settings = api, settings
        self._subnets: dict[tuple[str, str], str] = {}  # by project and setting
        self._families: dict[tuple[str, str], str] = {}  # by region and platform

    def forget(self) -> None:
        """Drop the cached subnets and images, because a cached subnet or image may have been
        deleted.
        """
        self._subnets.clear()
        self._families.clear()

    async def subnet(self, project: str, named: str = "") -> str:
        """Return the id of the subnet for machines: the subnet `named` or, if `named` is "", the
        subnet in the settings.
        """
        wanted = named or str(self._settings.get("subnet") or "")
        if (project, wanted) not in self._subnets:
            self._subnets[project, wanted] = await self._find_subnet(project, wanted)
        return self._subnets[project, wanted]

    async def image_family(self, gang: GangSpec) -> str:
        """Return the family of the boot image."""
        named = gang.options.get("image_family") or self._settings.get("image_family")
        if named:
            return str(named)
        offer = gang.offer
        place = offer.region, offer.instance_type.partition("_")[0]
        if place not in self._families:
            pattern = _CUDA if offer.accelerator_count else _PLAIN
            self._families[place] = await self._find_family(*place, pattern)
        return self._families[place]

    async def cluster(self, gang: GangSpec, project: str) -> str:
        """Return the GPU cluster of the gang's machines, or "" if the machines are in no cluster.
        Raises Refused if the task needs a cluster that the settings do not name.
        """
        wanted = gang.network is not None and gang.network.fabric is not None
        clusters = list_setting(self._settings, "gpu_clusters")
        if gang.offer.accelerator_count < 8 or not (wanted or clusters):
            return ""
        body = {"parentId": project, "pageSize": 100}
        told = await self._api.list("compute.GpuClusterService/List", body) if clusters else []
        here = [str(each["id"]) for each in told]
        found = [each for each in here if each in clusters]
        if wanted and not found:
            raise Refused(
                "[providers.nebius] gpu_clusters: the task needs InfiniBand, and the setting "
                f"names no GPU cluster of the project {project}; create one in the fabric of the "
                "platform (https://docs.nebius.com/compute/clusters/gpu) and name its id"
            )
        return found[0] if found else ""

    async def _find_subnet(self, project: str, wanted: str) -> str:
        body = {"parentId": project, "pageSize": 100}
        told = await self._api.list("vpc.SubnetService/List", body)
        names = {str(each["id"]): str(each["name"]) for each in told}
        if wanted:
            usable = [each for each, name in names.items() if wanted in (each, name)]
        else:
            usual = [each for each, name in names.items() if name.startswith("default-subnet")]
            usable = usual if len(usual) == 1 else list(names)
        if len(usable) == 1:
            return usable[0]
        problem = f"has several: {', '.join(sorted(names.values()))}" if usable else "has none"
        raise Refused(
            f"[providers.nebius] subnet: {project} needs one subnet{f' {wanted}' * bool(wanted)}, "
            f"and {problem}; name a subnet by its id"
        )

    async def _find_family(self, region: str, platform: str, pattern: re.Pattern[str]) -> str:
        body = {"region": region, "pageSize": 100}
        found: list[tuple[tuple[int, ...], str]] = []
        for each in await self._api.list("compute.ImageService/ListPublic", body):
            spec = each["spec"]
            family = str(spec.get("imageFamily") or "")
            fits = pattern.fullmatch(family)
            arm = spec.get("cpuArchitecture") == "ARM64"
            if fits and not arm and platform not in (spec.get("unsupportedPlatforms") or {}):
                found.append((tuple(int(part or 0) for part in fits.groups()), family))
        if not found:
            raise Refused(
                f"[providers.nebius] image_family: {region} lists no image of Ubuntu for "
                f"{platform}; name a family of images"
            )
        return max(found)[1]

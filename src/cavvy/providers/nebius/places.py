"""Finds the subnet, the image and the GPU cluster of a machine, from the settings or from the
defaults.
"""

import re
from collections.abc import Mapping

from cavvy.domain.tasks import Scalar
from cavvy.providers.base import GangSpec, Refused
from cavvy.providers.nebius.api import NebiusApi
from cavvy.providers.vm.keys import list_setting

# Nebius's public images: https://docs.nebius.com/compute/storage/boot-disk-images
_CUDA = re.compile(r"ubuntu(\d+)\.(\d+)-cuda(\d+)(?:\.(\d+))?")
_PLAIN = re.compile(r"ubuntu(\d+)\.(\d+)-driverless")


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

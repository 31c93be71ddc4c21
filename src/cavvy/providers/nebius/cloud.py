"""Implements `Cloud` for Nebius AI Cloud. One machine is one instance with a managed boot disk.

The operation that creates an instance can fail after Nebius has accepted the request. The failed
operation leaves the instance and its disk behind; `list` reports the instance as stopped, so that
`VmProvider` deletes the instance.

Offers combine the presets that Nebius lists for each project with the catalog's prices. The subnet,
the image and the GPU cluster of a machine come from the settings or from the defaults.
"""

import asyncio
import json
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from decimal import Decimal
from typing import Any

from cavvy.domain.events import ChargeKind
from cavvy.domain.offers import ExtraPrice, Offer, Purchase
from cavvy.domain.tasks import NetworkNeed, Objection, Scalar, TaskSpec
from cavvy.domain.units import parse_usd
from cavvy.domain.values import replace
from cavvy.providers.base import GangSpec, ProviderContext, Refused
from cavvy.providers.nebius.api import NebiusApi, find_detail
from cavvy.providers.vm import cloud as vm
from cavvy.providers.vm.account import keep_ours
from cavvy.providers.vm.cloud import CloudFault
from cavvy.providers.vm.keys import list_setting
from cavvy.providers.vm.leftovers import LeftoverScripts
from cavvy.providers.vm.regions import RegionalMarket, ask_regions, list_regions
from cavvy.providers.vm.rest import Json

USUAL_DISK = "network_ssd"  # the type of a boot disk, unless the task requests another
LEAST_GIB = 50  # the smallest boot disk that Cavvy requests

# Nebius's public images: https://docs.nebius.com/compute/storage/boot-disk-images
_CUDA = re.compile(r"ubuntu(\d+)\.(\d+)-cuda(\d+)(?:\.(\d+))?")
_PLAIN = re.compile(r"ubuntu(\d+)\.(\d+)-driverless")


# `nebius.compute.v1.InstanceStatus.InstanceState`. The status of an instance in the state "ERROR"
# is not documented; Cavvy deletes it.
_STATES = vm.StateNames(
    starting="CREATING STARTING",
    stopped="STOPPING STOPPED ERROR",
    ended="DELETING",
)
_FULL = "notEnoughResources"
# Sizes of these types are multiples of 93 GiB: https://docs.nebius.com/compute/storage/types
_DISK_TYPES = {
    "NETWORK_SSD": 1,
    "NETWORK_HDD": 1,
    "NETWORK_SSD_NON_REPLICATED": 93,
    "NETWORK_SSD_IO_M3": 93,
}


class NebiusCloud:
    """Implements `Cloud`."""

    # User data has at most 32,768 characters (`nebius.compute.v1.InstanceSpec`); the script is
    # written into it as JSON. A machine is billed from its start until it has stopped
    # (https://docs.nebius.com/legal/specific-terms/compute).
    traits = vm.CloudTraits(
        tokens=True,
        user_data_limit=28_000,
        bill_ends=vm.BillEnd.SHUTDOWN,
        quota_codes=frozenset({"quotaFailure"}),
    )

    def __init__(self, context: ProviderContext) -> None:
        self._settings = settings = context.settings
        self._api = NebiusApi(settings)
        self._market = NebiusMarket(self._api, context)
        self._places = NebiusPlaces(self._api, settings)
        self._leftovers = LeftoverScripts(self._loose_disks, self._delete_disks, context.now)
        self.close, self.object_to = self._api.close, object_to

    def identity(self) -> Sequence[tuple[str, str]]:
        """Return facts for `cavvy check`. The caller must first call `offers`, which finds the
        presets without a known price.
        """
        unpriced = ", ".join(self._market.unpriced)
        facts = [("API key", self._api.credentials().source)]
        facts += [("projects", ", ".join(self._market.project_ids()))]
        return [*facts, *([("GPU presets without a known price", unpriced)] if unpriced else [])]

    async def offers(self) -> Sequence[Offer]:
        return await self._market.offers()

    def silent(self) -> Sequence[str]:
        """See `HasParts.silent`."""
        return self._market.silent

    async def create(self, request: vm.MachineRequest) -> Sequence[str]:
        project = await self._market.project_of(request.offer.region)
        body = await self._make_body(request, project)
        try:
            told = await self._api.change("compute.InstanceService/Create", body, request.token)
        except vm.CloudFault as fault:
            if fault.status in (400, 404):
                self._places.forget()
            raise
        return [str(told["resourceId"])]

    async def list(self) -> Sequence[vm.CloudMachine]:
        """Return all instances whose names start with Cavvy's prefix, in the projects that
        answer."""

        async def read(project: str) -> Sequence[vm.CloudMachine]:
            body = {"parentId": project, "pageSize": 100}
            told = await self._api.list("compute.InstanceService/List", body)
            return await asyncio.gather(*(self._read(each) for each in keep_ours(told)))

        machines = await list_regions(self._market.project_ids(), read, self._market.region_of)
        with suppress(vm.CloudFault):  # the next sweep tries again
            await self._leftovers.sweep({each.name for each in machines})
        return machines

    async def get(self, machine: str) -> vm.CloudMachine | None:
        told = await self._api.read("compute.InstanceService/Get", {"id": machine})
        return await self._read(told)

    async def delete(self, machine: str) -> None:
        """Delete the instance with its managed disk."""
        await self._api.change("compute.InstanceService/Delete", {"id": machine})

    def is_full(self, fault: vm.CloudFault) -> bool:
        return fault.code == _FULL

    async def _make_body(self, request: vm.MachineRequest, project: str) -> Json:
        gang, offer, name = request.gang, request.offer, request.names[0]
        platform, _, preset = offer.instance_type.partition("_")
        spec: dict[str, Any] = {
            "resources": {"platform": platform, "preset": preset},
            "networkInterfaces": [await self._make_interface(gang.network, project)],
            "bootDisk": {
                "attachMode": "READ_WRITE",
                # a managed disk is deleted with its instance
                "managedDisk": {"name": name, "spec": await self._make_disk(gang)},
            },
            "cloudInitUserData": _wrap(request.user_data[0]),
            # by default, Nebius restarts an instance that has shut itself down, and bills it
            "recoveryPolicy": "FAIL",
        }
        if offer.purchase is Purchase.SPOT:
            spec["preemptible"] = {"onPreemption": "STOP"}
        if cluster := await self._places.cluster(gang, project):
            spec["gpuCluster"] = {"id": cluster}
        return {"metadata": {"parentId": project, "name": name}, "spec": spec}

    async def _make_interface(self, need: NetworkNeed | None, project: str) -> Json:
        need = need or NetworkNeed()
        interface: dict[str, Any] = {
            "name": "eth0",
            "subnetId": await self._places.subnet(project, need.subnet or ""),
            "ipAddress": {},
        }
        public = need.public_ip
        if bool(self._settings["public_address"]) if public is None else public:
            interface["publicIpAddress"] = {}
        if need.security_groups:
            interface["securityGroups"] = [{"id": each} for each in need.security_groups]
        return interface

    async def _make_disk(self, gang: GangSpec) -> Json:
        kind = (gang.disk_type or USUAL_DISK).upper()
        step = _DISK_TYPES.get(kind)
        if step is None:
            known = ", ".join(each.lower() for each in _DISK_TYPES)
            raise Refused(f"disk type {gang.disk_type}: Nebius has the types {known}")
        size = max(int(gang.disk_gib or self._settings["disk_gib"]), LEAST_GIB)
        family = await self._places.image_family(gang)
        return {
            "type": kind,
            "sizeGibibytes": str(-(-size // step) * step),
            "sourceImageFamily": {"imageFamily": family},
        }

    async def _read(self, told: Json) -> vm.CloudMachine:
        machine = _read(told)
        if machine.state in (vm.MachineState.RUNNING, vm.MachineState.ENDED):
            return machine
        body = {"resourceId": machine.id, "pageSize": 100}
        failed = [
            each["status"]
            for each in await self._api.list("compute.OperationService/List", body)
            if (each.get("status") or {}).get("code")
        ]
        if not failed:
            return machine
        return replace(
            machine,
            state=vm.MachineState.STOPPED,
            preempted=False,
            no_capacity=any(find_detail(each) == _FULL for each in failed),
            reason=f"Nebius reports: {failed[0].get('message') or 'the creation failed'}",
        )

    async def _loose_disks(self) -> Sequence[Json]:
        """Return the projects' disks that are attached to no instance, such as disks left by a
        failed creation.
        """
        told = [
            await self._api.list("compute.DiskService/List", {"parentId": project, "pageSize": 100})
            for project in self._market.project_ids()
        ]
        disks = [each for some in told for each in some]
        return [each for each in disks if not _is_attached(each["status"])]

    async def _delete_disks(self, disks: Collection[str]) -> None:
        for each in sorted(disks):
            try:
                await self._api.change("compute.DiskService/Delete", {"id": each})
            except vm.CloudFault as fault:
                if fault.status != 404:
                    raise


def _read(told: Json) -> vm.CloudMachine:
    status, spec = told["status"], told["spec"]
    word = str(status.get("state") or "CREATING")
    ports = status.get("networkInterfaces") or []
    public = [_address(each.get("publicIpAddress")) for each in ports]
    private = [_address(each.get("ipAddress")) for each in ports]
    state = _STATES[word]
    off = word in ("STOPPING", "STOPPED")
    created = told.get("createdAt")
    shown = next(filter(None, [*public, *private]), "")
    return vm.CloudMachine(
        id=str(told["id"]),
        name=str(told["name"]),
        state=state,
        address=next(filter(None, [*private, *public]), None),
        ssh=vm.SshTarget(address=shown) if shown else None,
        created_at=datetime.fromisoformat(created) if created else None,
        preempted=off and bool(spec.get("preemptible")),
        reason=""
        if state in (vm.MachineState.STARTING, vm.MachineState.RUNNING)
        else f"Nebius reports: {word}",
    )


def _is_attached(disk: Json) -> bool:
    """Return whether an instance uses the disk, according to the disk's
    `nebius.compute.v1.DiskStatus`.
    """
    return bool(disk.get("readWriteAttachment") or disk.get("readOnlyAttachments"))


def _address(told: Json) -> str:
    """Return an address without its prefix length, such as "10.0.0.5" for "10.0.0.5/32"."""
    return str((told or {}).get("address") or "").partition("/")[0]


def _wrap(script: str) -> str:
    """Return a cloud-init configuration that runs the script once. The configuration is written as
    JSON, which is valid YAML.
    """
    path = "/var/lib/cloud/cavvy-boot.sh"
    files = [{"path": path, "permissions": "0700", "content": script}]
    table = {"write_files": files, "runcmd": [["/bin/sh", path]]}
    return "#cloud-config\n" + json.dumps(table, ensure_ascii=False)


def object_to(task: TaskSpec) -> Sequence[Objection]:
    """Return the task's requirements that Nebius cannot meet."""
    need = task.resources.network
    named = need and (("vpc" if need.vpc else "") or ("key" if need.key else ""))
    if not named:
        return []
    reason = "on Nebius, a task selects its network only by a subnet's id and by security groups"
    return [Objection(f"resources.network.{named}", reason)]


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

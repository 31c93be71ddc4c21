"""Implements `Cloud` for Nebius AI Cloud. One machine is one instance with a managed boot disk.

The operation that creates an instance can fail after Nebius has accepted the request. The failed
operation leaves the instance and its disk behind; `list` reports the instance as stopped, so that
`VmProvider` deletes the instance.
"""

import asyncio
import json
from collections.abc import Collection, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.tasks import NetworkNeed, Objection, TaskSpec
from cavvy.domain.values import replace
from cavvy.providers.base import GangSpec, ProviderContext, Refused
from cavvy.providers.nebius.api import NebiusApi, find_detail
from cavvy.providers.nebius.market import LEAST_GIB, USUAL_DISK, NebiusMarket, NebiusPlaces
from cavvy.providers.vm import cloud as vm
from cavvy.providers.vm.account import keep_ours
from cavvy.providers.vm.leftovers import LeftoverScripts
from cavvy.providers.vm.regions import list_regions
from cavvy.providers.vm.rest import Json

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

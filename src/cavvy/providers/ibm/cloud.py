"""Implements `Cloud` for IBM Cloud. One machine is one virtual server instance or one bare metal
server in a VPC.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from cavvy.domain.offers import Offer, Purchase
from cavvy.providers.base import ProviderContext, Refused
from cavvy.providers.ibm import KEYS, bare_metal
from cavvy.providers.ibm.api import IamTokens, IbmApi
from cavvy.providers.ibm.cluster_networks import NO_FABRIC, ClusterNetworks
from cavvy.providers.ibm.market import NO_SUBNET, IbmMarket, IbmPlaces, check_default_image
from cavvy.providers.required_images import require_images
from cavvy.providers.vm import cloud as vm
from cavvy.providers.vm.account import keep_ours
from cavvy.providers.vm.keys import list_setting
from cavvy.providers.vm.records import MachineNames
from cavvy.providers.vm.regions import ask_regions, list_regions
from cavvy.providers.vm.rest import Json

# The enumerations of `Instance.status` and `InstanceStatusReason.code`, and of
# `BareMetalServer.status` and `BareMetalServerStatusReason.code`, in the Python package ibm-vpc
# 0.36.0. An instance that is "stopping" counts as running: it may not have its reason yet,
# and a deletion would hide that it was preempted.
_STATES = {
    "pending": vm.MachineState.STARTING,
    "starting": vm.MachineState.STARTING,
    "stopped": vm.MachineState.STOPPED,
    "failed": vm.MachineState.STOPPED,
    "deleting": vm.MachineState.ENDED,
}
_NO_CAPACITY = frozenset({"cannot_start_capacity", "cannot_start_placement_group"})
_PREEMPTED = "stopped_by_preemption"
_QUOTA = "over_quota"
# https://cloud.ibm.com/docs/vpc-on-classic?topic=vpc-on-classic-rias-error-messages: the name of
# the instance is in use, because an earlier request for it succeeded without a reply
_NAME_USED = "validation_unique_failed"
_NO_ADDRESS = "0.0.0.0"  # the address that the API reports until one is chosen
_DISK_TYPE = "general-purpose"
_INSTANCES = "instances"
_ENDED = vm.MachineState.ENDED
# the disk of IBM's own images: `VolumePrototypeInstanceByImageContext.capacity`
_LEAST_DISK_GIB = 100


class IbmCloud:
    """Implements `Cloud`."""

    # Names of instances are unique in a region, and so are those of bare metal servers. IBM
    # documents the size of user data as 64 K bytes
    # (https://cloud.ibm.com/docs/vpc?topic=vpc-user-data), and bills each second of an instance
    # without a minimum (https://cloud.ibm.com/docs/vpc?topic=vpc-suspend-billing); for bare metal
    # servers, see `bare_metal`.
    traits = vm.CloudTraits(
        name_limit=63,
        user_data_limit=64_000,
        quota_codes=frozenset({_QUOTA}),
    )

    def __init__(self, context: ProviderContext) -> None:
        self._settings = settings = context.settings
        self._api = IbmApi(settings, IamTokens(settings, context.now))
        self._market = IbmMarket(self._api, context)
        self._places = IbmPlaces(self._api, settings, context.now)
        mark = MachineNames(context.installation, self.traits.name_limit).mark
        self._clusters = ClusterNetworks(self._api, settings, mark, context.now)
        self._silent: Sequence[str] = ()  # the regions that did not list their subnets

    def close(self) -> None:
        self._api.close()
        self._market.close()

    def identity(self) -> Sequence[tuple[str, str]]:
        """Return facts for `cavvy check`. The caller must first call `offers`, which finds out
        which profiles have no known price.
        """
        unpriced = ", ".join(self._market.unpriced)
        facts = KEYS.facts(self._settings, self._market.unknown)
        return [*facts, *([("profiles without a known price", unpriced)] if unpriced else [])]

    async def offers(self) -> Sequence[Offer]:
        offers = await self._market.offers()
        answered = sorted({each.region for each in offers})
        usable, self._silent = await ask_regions(answered, self._places.zones)
        if answered and not usable and not self.silent():
            regions = ", ".join(self._market.regions)
            raise Refused(
                f"[providers.ibm] subnet: no zone of {regions} has a suitable subnet; {NO_SUBNET}"
            )
        offers = [each for each in offers if each.zone in usable]
        return require_images(offers, self._settings.get("image"), check_default_image)

    def silent(self) -> Sequence[str]:
        """See `HasParts.silent`."""
        return [*self._market.silent, *self._silent]

    async def create(self, request: vm.MachineRequest) -> Sequence[str]:
        region = request.offer.region
        metal = bare_metal.is_bare_metal(request.offer.instance_type)
        kind = bare_metal.PATH if metal else _INSTANCES
        try:
            body = await self._make_body(request, metal)
            told = await self._api.send(region, "POST", f"/{kind}", body)
        except vm.CloudFault as fault:
            if fault.status in (400, 404):
                self._places.forget()
                self._clusters.forget()
            raise _name(fault) from fault
        return [_make_id(region, kind, told)]

    async def list(self) -> Sequence[vm.CloudMachine]:
        """Return all machines whose names start with Cavvy's prefix, in the regions that answer.
        Bare metal servers are listed only if the settings name their profiles, because a key may
        lack the right to list them.
        """
        kinds = [_INSTANCES, *([bare_metal.PATH] if self._market.bare_metal else [])]

        async def read(region: str) -> Sequence[vm.CloudMachine]:
            lists = [keep_ours(await self._api.list(region, f"/{kind}", kind)) for kind in kinds]
            live = [each for each in lists[0] if _STATES.get(str(each["status"])) is not _ENDED]
            await self._clusters.remove_unused(region, [str(each["name"]) for each in live])
            return [
                _read(region, each, kind)
                for kind, told in zip(kinds, lists, strict=True)
                for each in told
            ]

        return await list_regions(self._market.regions, read)

    async def get(self, machine: str) -> vm.CloudMachine | None:
        region, kind, path = _locate(machine)
        return _read(region, await self._api.get(region, path), kind)

    async def delete(self, machine: str) -> None:
        """Delete the instance or server; the boot volume is deleted too."""
        region, kind, path = _locate(machine)
        if kind == bare_metal.PATH:
            await bare_metal.delete_server(self._api, region, path)
        else:
            await self._api.send(region, "DELETE", path)

    def is_full(self, fault: vm.CloudFault) -> bool:
        return "capacity" in fault.code or fault.code == NO_FABRIC

    async def _make_body(self, request: vm.MachineRequest, metal: bool) -> Mapping[str, Any]:
        offer, gang = request.offer, request.gang
        subnet = await self._places.subnet(offer)
        network: dict[str, Any] = {"subnet": {"id": subnet["id"]}}
        if groups := list_setting(self._settings, "security_groups"):
            network["security_groups"] = [{"id": each} for each in groups]
        image = await self._places.image(gang)
        if metal:
            body = bare_metal.make_body(request, image, network)
        else:
            body = self._make_instance_body(request, image, network)
            if attached := await self._clusters.attach(request, str(subnet["vpc"]["id"])):
                body["cluster_network_attachments"] = attached
        if group := self._settings.get("resource_group"):
            body["resource_group"] = {"id": group}
        return body

    def _make_instance_body(
        self, request: vm.MachineRequest, image: str, network: Mapping[str, Any]
    ) -> dict[str, Any]:
        offer, gang = request.offer, request.gang
        size = max(_LEAST_DISK_GIB, int(gang.disk_gib or str(self._settings["disk_gib"])))
        body: dict[str, Any] = {
            "name": request.names[0],
            "zone": {"name": offer.zone},
            "profile": {"name": offer.instance_type},
            "image": {"id": image},
            "primary_network_interface": network,
            "boot_volume_attachment": {
                "delete_volume_on_instance_delete": True,
                "volume": {"capacity": size, "profile": {"name": gang.disk_type or _DISK_TYPE}},
            },
            # the server restarts the job, not IBM
            "availability_policy": {"host_failure": "stop"},
            "user_data": request.user_data[0],
        }
        if offer.purchase is Purchase.SPOT:
            body["availability"] = {"class": "spot"}
            # a deleted instance would not report that it was preempted
            body["availability_policy"]["preemption"] = "stop"
            body["reservation_affinity"] = {"policy": "disabled"}
        return body


def _make_id(region: str, kind: str, told: Json) -> str:
    """Return the id that the code in `vm` uses for a machine: the region, the kind (omitted for an
    instance) and IBM's id.
    """
    return f"{region}/{told['id']}" if kind == _INSTANCES else f"{region}/{kind}/{told['id']}"


def _locate(machine: str) -> tuple[str, str, str]:
    """Return the region, the kind and the path of a machine, from its id."""
    region, _, rest = machine.partition("/")
    kind, _, number = rest.rpartition("/")
    return region, kind or _INSTANCES, f"/{kind or _INSTANCES}/{number}"


def _read(region: str, told: Json, kind: str = _INSTANCES) -> vm.CloudMachine:
    status = str(told["status"])
    reasons = {str(each["code"]): str(each["message"]) for each in told["status_reasons"]}
    state = _STATES.get(status, vm.MachineState.RUNNING)  # unknown states may be billed
    interface = told.get("primary_network_interface") or {}
    address = str((interface.get("primary_ip") or {}).get("address") or _NO_ADDRESS)
    known = address != _NO_ADDRESS
    quiet = state in (vm.MachineState.STARTING, vm.MachineState.RUNNING, vm.MachineState.ENDED)
    details = ", ".join([status, *(f"{code}: {text}" for code, text in reasons.items())])
    return vm.CloudMachine(
        id=_make_id(region, kind, told),
        name=str(told["name"]),
        state=state,
        address=address if known else None,
        ssh=vm.SshTarget(address=address) if known else None,
        created_at=datetime.fromisoformat(told["created_at"]),
        preempted=_PREEMPTED in reasons,
        no_capacity=bool(_NO_CAPACITY & reasons.keys()),
        reason="" if quiet else f"IBM reports: {details}",
        waits=f"IBM reports: {details}" if state is vm.MachineState.STARTING else "",
    )


def _name(fault: vm.CloudFault) -> vm.CloudFault:
    """Convert the fault of a failed creation to a fault with the code and status that `VmProvider`
    handles.
    """
    if fault.code == _NAME_USED:
        return vm.CloudFault(409, fault.code, fault.message)
    if "quota" in fault.code:
        return vm.CloudFault(fault.status, _QUOTA, f"{fault.code}: {fault.message}")
    return fault

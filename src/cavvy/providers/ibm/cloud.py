"""Implements `Cloud` for IBM Cloud. One machine is one virtual server instance or one bare metal
server in a VPC.

Creates a cluster network for each gang whose profile has one, and deletes it after the gang.

A cluster network connects the GPUs of instances by RDMA over Ethernet. IBM's VPC API publishes
which profiles have one, in which zones, and how many attachments an instance may have. For H100 and
H200 these are 8, 16 or 32, each in a subnet of its own, and IBM recommends to start with the
fewest: https://cloud.ibm.com/docs/vpc?topic=vpc-planning-cluster-network (November 2026). Resources
of the VPC API have no tags, so the network's name has the installation's mark.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.tasks import Scalar
from cavvy.providers.base import GangSpec, ProviderContext, Refused
from cavvy.providers.ibm import KEYS, bare_metal
from cavvy.providers.ibm.api import IamTokens, IbmApi
from cavvy.providers.ibm.market import NO_SUBNET, IbmMarket, IbmPlaces, check_default_image
from cavvy.providers.required_images import require_images
from cavvy.providers.vm import cloud as vm
from cavvy.providers.vm.account import keep_ours
from cavvy.providers.vm.cloud import NAME_PREFIX, CloudFault, MachineRequest
from cavvy.providers.vm.keys import list_setting
from cavvy.providers.vm.leftovers import MOST_DELETED, UNUSED, LeftoverSearch
from cavvy.providers.vm.records import MachineNames
from cavvy.providers.vm.regions import ask_regions, list_regions
from cavvy.providers.vm.rest import Json

# The enumerations of `Instance.status` and `InstanceStatusReason.code`, and of
# `BareMetalServer.status` and `BareMetalServerStatusReason.code`, in the Python package ibm-vpc
# 0.36.0. An instance that is "stopping" counts as running: it may not have its reason yet,
# and a deletion would hide that it was preempted.
_STATES = vm.StateNames(starting="pending starting", stopped="stopped failed", ended="deleting")
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

NO_FABRIC = "no cluster network"  # Cavvy's own code
_PATH, _FIELD = "/cluster_networks", "cluster_networks"
_NOT_YET = 425
_DEPRECATED = "h100"  # IBM's page above: replaced by hopper-1
# The least size of a subnet. IBM reserves 5 addresses of a subnet of a VPC, and does not say how
# many of a cluster network's.
_LEAST_ADDRESSES, _RESERVED = 16, 8


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
            live = [each for each in lists[0] if _STATES[str(each["status"])] is not _ENDED]
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
    state = _STATES[status]
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


class ClusterNetworks:
    """Creates and deletes the cluster networks of an installation. Methods raise CloudFault, with
    the status 425 until the network is ready, and Refused.
    """

    def __init__(
        self, api: IbmApi, settings: Mapping[str, Scalar], mark: str, now: Callable[[], datetime]
    ) -> None:
        self._api, self._settings, self._now = api, settings, now
        self._prefix = f"{NAME_PREFIX}{mark}-"
        self._kinds: dict[tuple[str, str | None, str], tuple[str, int]] = {}
        self._ready: dict[tuple[str, str], Sequence[str]] = {}  # region, name -> ids of subnets
        self._leftovers = LeftoverSearch()

    async def attach(self, request: MachineRequest, vpc: str) -> Sequence[Json]:
        """Return the attachments of an instance; () if nothing can or must be attached. Creates the
        gang's network if it does not exist.
        """
        offer, gang = request.offer, request.gang
        if gang.nodes == 1 or offer.accelerator is None:
            return ()
        kind, count = "", 0
        if self._settings["cluster_networks"]:
            kind, count = await self._read_kind(offer)
        if not kind:
            _check_fabric(offer, gang)
            return ()
        name = request.names[0].rsplit("-", 2)[0]
        if (offer.region, name) not in self._ready:
            network = await self._find(offer, name, kind, vpc)
            subnets = await self._make_subnets(offer.region, network, count, gang.nodes)
            self._ready[offer.region, name] = subnets
        subnets = self._ready[offer.region, name]
        return [
            {"cluster_network_interface": {"auto_delete": True, "subnet": {"id": each}}}
            for each in subnets
        ]

    def forget(self) -> None:
        """Forget all networks, because a person may have deleted one."""
        self._ready.clear()
        self._kinds.clear()

    async def remove_unused(self, region: str, machines: Collection[str]) -> None:
        """Delete the networks that are older than an hour and in which none of the machines is.
        `machines` are the names of all machines of the region.
        """
        now = self._now()
        if not self._settings["cluster_networks"] or not self._leftovers.is_due(region, now):
            return
        used = {each.rsplit("-", 2)[0] for each in machines}

        def is_old(told: Json) -> bool:
            name = str(told["name"])
            ours = name.startswith(self._prefix) and name not in used
            at = datetime.fromisoformat(str(told["created_at"]))
            return ours and told["lifecycle_state"] != "deleting" and at < now - UNUSED

        # an account without cluster networks, or without the right to delete them, has nothing here
        with suppress(CloudFault, Refused):
            listed = await self._api.list(region, _PATH, _FIELD)
            for each in [each for each in listed if is_old(each)][:MOST_DELETED]:
                self._ready.pop((region, str(each["name"])), None)
                await self._api.send(region, "DELETE", f"{_PATH}/{each['id']}")

    async def _read_kind(self, offer: Offer) -> tuple[str, int]:
        """Return the profile of cluster networks for an offer, and the number of attachments of an
        instance; ("", 0) if the offer's zone or profile has none.
        """
        place = offer.region, offer.zone, offer.instance_type
        if place not in self._kinds:
            told = await self._api.get(offer.region, f"/instance/profiles/{offer.instance_type}")
            counts = (told.get("cluster_network_attachment_count") or {}).get("values") or ()
            count = min((int(each) for each in counts if int(each) > 0), default=0)
            names = [
                str(each["name"]) for each in told.get("supported_cluster_network_profiles", ())
            ]
            names = sorted(names, key=lambda each: (each == _DEPRECATED, each)) if count else []
            self._kinds[place] = "", 0
            for each in names:
                profile = await self._api.get(offer.region, f"/cluster_network/profiles/{each}")
                if offer.zone in [zone["name"] for zone in profile["zones"]]:
                    self._kinds[place] = each, count
                    break
        return self._kinds[place]

    async def _find(self, offer: Offer, name: str, kind: str, vpc: str) -> str:
        """Return the id of the network with this name. Requests the network if it is missing."""
        body: dict[str, Any] = {
            "name": name,
            "profile": {"name": kind},
            "vpc": {"id": vpc},
            "zone": {"name": offer.zone},
        }
        if group := self._settings.get("resource_group"):
            body["resource_group"] = {"id": group}
        try:
            found = await self._api.list(offer.region, _PATH, _FIELD, name=name)
            if not found:
                found = [await self._api.send(offer.region, "POST", _PATH, body)]
        except CloudFault as fault:
            if fault.status in (403, 404) and "quota" not in fault.code:
                raise Refused(
                    f"[providers.ibm]: {offer.region} creates no cluster network: {fault}; let the "
                    "API key edit VPC Infrastructure Services, or set `cluster_networks` to false, "
                    "which leaves the RDMA network of a gang's GPUs unused"
                ) from fault
            raise
        _check_state(found, f"the cluster network {name}")
        return str(found[0]["id"])

    async def _make_subnets(
        self, region: str, network: str, count: int, nodes: int
    ) -> Sequence[str]:
        """Return the ids of the network's subnets. Requests those that are missing."""
        path = f"{_PATH}/{network}/subnets"
        found = {str(each["name"]): each for each in await self._api.list(region, path, "subnets")}
        size = max(_LEAST_ADDRESSES, 1 << (nodes + _RESERVED - 1).bit_length())
        names = [f"gpu-{number}" for number in range(count)]
        for each in names:
            if each not in found:
                body = {"name": each, "total_ipv4_address_count": size}
                found[each] = await self._api.send(region, "POST", path, body)
        _check_state([found[each] for each in names], "the subnets of a cluster network")
        return [str(found[each]["id"]) for each in names]


def _check_state(told: Sequence[Json], what: str) -> None:
    """Raise CloudFault unless all resources can be used."""
    states = sorted({str(each["lifecycle_state"]) for each in told} - {"stable"})
    if "failed" in states or "suspended" in states:
        raise CloudFault(400, "cluster_network_failed", f"IBM reports {what} as {states[0]}")
    if states:
        raise CloudFault(_NOT_YET, "cluster_network_pending", f"IBM reports {what} as {states[0]}")


def _check_fabric(offer: Offer, gang: GangSpec) -> None:
    if gang.network is not None and gang.network.fabric is not None:
        why = f"{offer.instance_type} has no cluster network in {offer.zone}, or the setting "
        raise CloudFault(409, NO_FABRIC, f"{why}`cluster_networks` is false")

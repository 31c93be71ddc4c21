"""Implements `Cloud` for Oracle Cloud Infrastructure. Each machine is created by one LaunchInstance
request. OCI reports addresses with an instance's virtual network interfaces, not with the instance
itself (https://docs.oracle.com/en-us/iaas/api/#/en/iaas/20160918/Vnic/).

Creates a compute cluster for each gang whose shape has RDMA, and deletes it after the gang.

A compute cluster is an empty group of the RDMA network. An instance that is launched into it is
connected to the others. A cluster costs nothing.
https://docs.oracle.com/en-us/iaas/Content/Compute/Tasks/compute-clusters.htm
"""

import base64
import hashlib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, NamedTuple

from cavvy.catalog.networks import find_fabric
from cavvy.domain.offers import Offer, Purchase
from cavvy.providers.base import ProviderContext, Refused
from cavvy.providers.oci.api import OciApi, OciCredentials
from cavvy.providers.oci.market import OciMarket, OciPlaces, OciQuotas, find_default, shape_of
from cavvy.providers.required_images import require_images
from cavvy.providers.vm import cloud as vm
from cavvy.providers.vm.cloud import CloudFault, MachineRequest
from cavvy.providers.vm.leftovers import MOST_DELETED, UNUSED, LeftoverSearch
from cavvy.providers.vm.records import GANG, INSTALLATION, MachineNames
from cavvy.providers.vm.regions import list_regions
from cavvy.providers.vm.rest import Json

# If there is no capacity, LaunchInstance answers with the status 500 and mostly with the code
# InternalError, as for other faults. So the message must be examined:
# https://docs.oracle.com/en-us/iaas/Content/Compute/Tasks/troubleshooting-out-of-host-capacity.htm
_NO_HOST = re.compile(r"out of (host )?capacity", re.IGNORECASE)
_FULL = "OutOfHostCapacity"
# This code means that the retry token belongs to an instance or a cluster that was deleted:
# https://docs.oracle.com/en-us/iaas/Content/API/References/apierrors.htm
_OLD_TOKEN = "InvalidatedRetryToken"
# https://docs.oracle.com/en-us/iaas/api/#/en/iaas/20160918/datatypes/Instance
_STATES = vm.StateNames(
    starting="PROVISIONING STARTING",
    stopped="STOPPING STOPPED",
    ended="TERMINATING TERMINATED",
)
_ENDED = vm.MachineState.ENDED
# Platform images refuse all connections except SSH, but the nodes of a gang must reach each other:
# https://docs.oracle.com/en-us/iaas/Content/Network/Concepts/waystosecure.htm. Oracle Linux uses
# its whole boot volume only after `oci-growfs` of the package oci-utils.
_PREPARE = """\
{{ firewall-cmd --zone=trusted --add-source={network} || iptables -I INPUT -s {network} -j ACCEPT
  if [ -x /usr/libexec/oci-growfs ]; then /usr/libexec/oci-growfs -y; fi; }} >/dev/null 2>&1
"""

_PATH = "/computeClusters"
# Oracle Cloud Agent's plugins that configure the RDMA network:
# https://docs.oracle.com/en-us/iaas/Content/Compute/Tasks/manage-plugins.htm
PLUGINS = ("Compute HPC RDMA Authentication", "Compute HPC RDMA Auto-Configuration")


class OciCloud:
    """Implements `Cloud`."""

    # A display name and a value of a free-form tag have at most 255 characters; all metadata of an
    # instance has at most 32,000 bytes, and its user data is in base 64. Source: the description of
    # LaunchInstance in OCI's API reference. A retry token is valid for 24 hours, longer than a
    # launch is repeated.
    traits = vm.CloudTraits(
        name_limit=255,
        tags=True,
        tokens=True,
        user_data_limit=23_000,
        quota_codes=frozenset({"LimitExceeded", "QuotaExceeded"}),
    )

    def __init__(self, context: ProviderContext) -> None:
        self._settings, now = context.settings, context.now
        settings = self._settings
        self._credentials = OciCredentials(settings)
        self._api = OciApi(settings, self._credentials)
        self._market = OciMarket(self._api, self._credentials, context)
        self._places = OciPlaces(self._api, settings, self._market, now)
        self._addresses = OciAddresses(self._api)
        self._quotas = OciQuotas(
            self._api, self._market, lambda: self._credentials.profile().tenancy, now
        )
        mark = MachineNames(context.installation, self.traits.name_limit).mark
        self._clusters = ComputeClusters(self._api, mark, now)
        self.quotas = self._quotas.read
        self.close = self._api.close

    def identity(self) -> Sequence[tuple[str, str]]:
        """Return facts for `cavvy check`. The caller must first call `offers`, which finds the
        shapes without a known price.
        """
        profile, unpriced = self._credentials.profile(), ", ".join(self._market.unpriced)
        facts = [("API key", profile.file), ("user", profile.user), ("tenancy", profile.tenancy)]
        facts += [("GPU shapes without a known price", unpriced)] if unpriced else []
        silent = "; ".join(self._quotas.silent)
        return [*facts, *([("quotas", f"cannot be read: {silent}")] if silent else [])]

    async def offers(self) -> Sequence[Offer]:
        offers = require_images(
            await self._market.offers(), self._settings.get("image"), find_default
        )
        return await self._quotas.limit(offers)

    def silent(self) -> Sequence[str]:
        """See `HasParts.silent`."""
        return self._market.silent

    def untold_quotas(self) -> Sequence[str]:
        """See `TellsQuotas.untold_quotas`."""
        return self._quotas.untold

    async def create(self, request: vm.MachineRequest) -> Sequence[str]:
        region = request.offer.region
        self._quotas.forget()
        try:
            body = await self._make_body(request)
            told = await self._api.send(region, "POST", "/instances", body, token=request.token)
        except vm.CloudFault as fault:
            if fault.status in (400, 404):
                self._places.forget()
                self._clusters.forget()
            if fault.code == _FULL or (fault.status == 500 and _NO_HOST.search(fault.message)):
                raise vm.CloudFault(400, _FULL, fault.message) from fault
            if fault.code == _OLD_TOKEN:
                raise vm.CloudFault(400, fault.code, fault.message) from fault
            raise
        return [f"{region}/{told['id']}"]

    async def list(self) -> Sequence[vm.CloudMachine]:
        """Return the compartment's instances with Cavvy's tag, in the regions that answer."""
        compartment, regions = await self._market.compartment(), await self._market.regions()

        async def read(region: str) -> Sequence[vm.CloudMachine]:
            told = await self._api.list(
                region, "/instances", compartmentId=compartment, limit="500"
            )
            ours = [each for each in told if INSTALLATION in (each.get("freeformTags") or {})]
            if self._settings["reach_by_ssh"]:
                up = [str(each["id"]) for each in ours if each["lifecycleState"] == "RUNNING"]
                await self._addresses.find(region, compartment, up)
            if self._settings["compute_clusters"]:
                live = [each for each in ours if _STATES[each["lifecycleState"]] is not _ENDED]
                gangs = {str(each["freeformTags"].get(GANG)) for each in live}
                await self._clusters.remove_unused(region, compartment, gangs)
            return [self._read(region, each) for each in ours]

        return await list_regions(regions, read)

    async def get(self, machine: str) -> vm.CloudMachine | None:
        region, _, ocid = machine.partition("/")
        return self._read(region, await self._api.get(region, f"/instances/{ocid}"))

    async def delete(self, machine: str) -> None:
        """Terminate the instance; its boot volume is deleted too. The status 404 also means that
        the user lacks the permission, so other requests must confirm that the instance no longer
        exists.
        """
        self._quotas.forget()
        region, _, ocid = machine.partition("/")
        path = f"/instances/{ocid}"
        try:
            await self._api.send(region, "DELETE", f"{path}?preserveBootVolume=false")
        except vm.CloudFault as fault:
            if fault.status == 404 and await self._is_left(region, ocid):
                raise Refused(
                    f"[providers.oci]: {region} does not terminate the instance {ocid}: {fault}; "
                    "check the policy of the user's group (docs/guides/oci.md)"
                ) from fault
            raise

    def is_full(self, fault: vm.CloudFault) -> bool:
        return fault.code == _FULL

    async def _is_left(self, region: str, ocid: str) -> bool:
        """Return whether the instance exists and was not terminated. Raises Refused if the user has
        no permission to list instances, because OCI can hide an existing instance from such a user.
        """
        try:
            found = [await self._api.get(region, f"/instances/{ocid}")]
        except vm.CloudFault as fault:
            if fault.status != 404:
                raise
            compartment = await self._market.compartment()
            found = [*await self._api.list(region, "/instances", compartmentId=compartment)]
        states = [str(each["lifecycleState"]) for each in found if each["id"] == ocid]
        return any(_STATES[each] is not vm.MachineState.ENDED for each in states)

    async def _make_body(self, request: vm.MachineRequest) -> Mapping[str, Any]:
        offer, gang = request.offer, request.gang
        subnet = await self._places.subnet(offer)
        shown = bool(self._settings["public_address"]) and not subnet["prohibitPublicIpOnVnic"]
        body: dict[str, Any] = {
            "availabilityDomain": offer.zone,
            "compartmentId": await self._market.compartment(),
            "displayName": request.names[0],
            "freeformTags": dict(request.tags),
            "shape": shape_of(offer),
            "sourceDetails": {
                "sourceType": "image",
                "imageId": await self._places.image(gang),
                "bootVolumeSizeInGBs": max(50, int(gang.disk_gib or self._settings["disk_gib"])),
            },
            "createVnicDetails": {"subnetId": subnet["id"], "assignPublicIp": shown},
            "metadata": {"user_data": _encode(request.user_data[0], str(subnet["cidrBlock"]))},
        }
        if self._settings["compute_clusters"] and needs_cluster(request):
            body["computeClusterId"] = await self._clusters.find(request, body["compartmentId"])
            plugins = [{"name": each, "desiredState": "ENABLED"} for each in PLUGINS]
            body["agentConfig"] = {"pluginsConfig": plugins}
        if gang.disk_type:
            body["sourceDetails"]["bootVolumeVpusPerGB"] = _read_performance(gang.disk_type)
        if shape_of(offer) != offer.instance_type:
            size = {"vcpus": int(offer.vcpus), "memoryInGBs": offer.memory_mib / 1024}
            body["shapeConfig"] = size
        if offer.purchase is Purchase.SPOT:
            action = {"type": "TERMINATE", "preserveBootVolume": False}
            body["preemptibleInstanceConfig"] = {"preemptionAction": action}
        else:  # the server restarts the job, not OCI
            body["availabilityConfig"] = {"recoveryAction": "STOP_INSTANCE"}
        return body

    def _read(self, region: str, told: Json) -> vm.CloudMachine:
        machine, status = f"{region}/{told['id']}", str(told["lifecycleState"])
        state = _STATES[status]
        # OCI does not report whether it or a user has terminated an instance
        preemptible = bool(told.get("preemptibleInstanceConfig"))
        quiet = state in (vm.MachineState.STARTING, vm.MachineState.RUNNING)
        addresses = self._addresses.known.get(str(told["id"]))
        return vm.CloudMachine(
            id=machine,
            name=str(told["displayName"]),
            state=state,
            address=addresses and addresses.private,
            ssh=addresses and addresses.ssh,
            tags=dict(told.get("freeformTags") or {}),
            created_at=datetime.fromisoformat(told["timeCreated"]),
            # other users of the compartment should not terminate these instances
            preempted_or_deleted=preemptible and state is vm.MachineState.ENDED,
            reason="" if quiet else f"OCI reports: {status}",
        )


def _encode(user_data: str, network: str) -> str:
    """Return the user data in base 64, preceded by the commands that OCI's platform images must run
    first.
    """
    shebang, _, script = user_data.partition("\n")
    text = f"{shebang}\n{_PREPARE.format(network=network)}{script}"
    return base64.b64encode(text.encode()).decode()


def _read_performance(disk_type: str) -> int:
    """Return the volume performance units per GB. OCI uses these units instead of disk types."""
    if not re.fullmatch(r"(10|20|[3-9]0|1[0-2]0)", disk_type):
        raise Refused(
            f"disk type {disk_type}: OCI's boot volumes have no types, but a number of performance "
            "units: a multiple of ten from 10 to 120"
        )
    return int(disk_type)


class InstanceAddresses(NamedTuple):
    """The addresses of an instance's primary interface."""

    private: str  # for the other nodes of a gang: security lists mostly allow the subnet only
    ssh: vm.SshTarget  # the public address, if the instance has one


class OciAddresses:
    """Finds and caches the addresses of running instances. `known` is keyed by OCID, which is
    unique across regions.
    """

    def __init__(self, api: OciApi) -> None:
        self._api = api
        self.known: dict[str, InstanceAddresses] = {}
        self._up: dict[str, frozenset[str]] = {}  # the running instances of each region

    async def find(self, region: str, compartment: str, instances: Sequence[str]) -> None:
        """Find the addresses of the running instances, except addresses that are already known.
        Forget the addresses of instances that no longer run. An instance without an attached
        interface gets no addresses. Raises CloudFault, Refused.
        """
        self._forget(self._up.get(region, frozenset()) - set(instances))
        self._up[region] = frozenset(instances)
        unknown = {each for each in instances if each not in self.known}
        if not unknown:
            return
        told = await self._api.list(
            region, "/vnicAttachments", compartmentId=compartment, limit="500"
        )
        for each in told:
            if each["instanceId"] in unknown and each["lifecycleState"] == "ATTACHED":
                await self._read(region, str(each["instanceId"]), str(each["vnicId"]))

    def _forget(self, instances: Collection[str]) -> None:
        for each in instances:
            self.known.pop(each, None)

    async def _read(self, region: str, instance: str, interface: str) -> None:
        try:
            vnic = await self._api.get(region, f"/vnics/{interface}")
        except vm.CloudFault as fault:
            if fault.status != 404:  # the instance may have ended since
                raise
            return
        if vnic.get("isPrimary"):
            private = str(vnic["privateIp"])
            target = vm.SshTarget(address=str(vnic.get("publicIp") or private))
            self.known[instance] = InstanceAddresses(private, target)


def needs_cluster(request: MachineRequest) -> bool:
    """Return whether the request is for a node of a gang that an RDMA network can connect."""
    offer = request.offer
    rdma = find_fabric("oci", offer.instance_type) is not None
    return request.gang.nodes > 1 and rdma and offer.purchase is not Purchase.SPOT


class ComputeClusters:
    """Creates and deletes the compute clusters of an installation, whose mark is in their tags."""

    def __init__(self, api: OciApi, mark: str, now: Callable[[], datetime]) -> None:
        self._api, self._mark, self._now = api, mark, now
        self._known: dict[str, str] = {}  # name -> OCID
        self._leftovers = LeftoverSearch()

    async def find(self, request: MachineRequest, compartment: str) -> str:
        """Return the OCID of the cluster of a gang, and create the cluster if it does not exist.
        Raises CloudFault, Refused.
        """
        offer, name = request.offer, request.names[0].rsplit("-", 2)[0]
        if name not in self._known:
            body = {
                "availabilityDomain": offer.zone,
                "compartmentId": compartment,
                "displayName": name,
                "freeformTags": dict(request.tags),
            }
            # display names are not unique, but a repeated request with the same token is
            token = hashlib.sha256(f"{name} {offer.zone}".encode()).hexdigest()[:32]
            try:
                told = await self._api.send(offer.region, "POST", _PATH, body, token=token)
            except CloudFault as fault:
                if fault.status == 404:  # OCI hides what the user may not use
                    raise Refused(
                        f"[providers.oci]: {offer.region} creates no compute cluster: {fault}; let "
                        "the user's group `manage compute-clusters`, or set `compute_clusters` to "
                        "false, which leaves the RDMA network of a gang's nodes unused"
                    ) from fault
                raise
            self._known[name] = str(told["id"])
        return self._known[name]

    def forget(self) -> None:
        """Forget all clusters, because a person may have deleted one."""
        self._known.clear()

    async def remove_unused(self, region: str, compartment: str, gangs: Collection[str]) -> None:
        """Delete the clusters that are older than an hour and belong to none of the gangs."""
        now = self._now()
        if not self._leftovers.is_due(region, now):
            return

        def is_old(told: Json) -> bool:
            tags = told.get("freeformTags") or {}
            ours = tags.get(INSTALLATION) == self._mark and tags.get(GANG) not in gangs
            at = datetime.fromisoformat(str(told["timeCreated"]))
            return ours and told["lifecycleState"] == "ACTIVE" and at < now - UNUSED

        # without the right to list or delete clusters, they stay, which costs nothing
        with suppress(CloudFault, Refused):
            listed = await self._api.list(region, _PATH, compartmentId=compartment, limit="500")
            for each in [each for each in listed if is_old(each)][:MOST_DELETED]:
                await self._api.send(region, "DELETE", f"{_PATH}/{each['id']}")
                gone = {name for name, ocid in self._known.items() if ocid == each["id"]}
                for name in gone:
                    del self._known[name]

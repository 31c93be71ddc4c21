"""Creates a cluster network for each gang whose profile has one, and deletes it after the gang.

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

from cavvy.domain.offers import Offer
from cavvy.domain.tasks import Scalar
from cavvy.providers.base import GangSpec, Refused
from cavvy.providers.ibm.api import IbmApi
from cavvy.providers.managed.leftovers import MOST_DELETED, UNUSED, LeftoverSearch
from cavvy.providers.vm.cloud import NAME_PREFIX, CloudFault, MachineRequest
from cavvy.providers.vm.rest import Json

NO_FABRIC = "no cluster network"  # Cavvy's own code
_PATH, _FIELD = "/cluster_networks", "cluster_networks"
_NOT_YET = 425
_DEPRECATED = "h100"  # IBM's page above: replaced by hopper-1
# The least size of a subnet. IBM reserves 5 addresses of a subnet of a VPC, and does not say how
# many of a cluster network's.
_LEAST_ADDRESSES, _RESERVED = 16, 8


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

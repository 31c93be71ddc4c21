"""Creates a compute cluster for each gang whose shape has RDMA, and deletes it after the gang.

A compute cluster is an empty group of the RDMA network. An instance that is launched into it is
connected to the others. A cluster costs nothing.
https://docs.oracle.com/en-us/iaas/Content/Compute/Tasks/compute-clusters.htm
"""

import hashlib
from collections.abc import Callable, Collection
from contextlib import suppress
from datetime import datetime

from cavvy.catalog.networks import find_fabric
from cavvy.domain.offers import Purchase
from cavvy.providers.base import Refused
from cavvy.providers.managed.leftovers import MOST_DELETED, UNUSED, LeftoverSearch
from cavvy.providers.oci.api import OciApi
from cavvy.providers.vm.cloud import CloudFault, MachineRequest
from cavvy.providers.vm.records import GANG, INSTALLATION
from cavvy.providers.vm.rest import Json

_PATH = "/computeClusters"
# Oracle Cloud Agent's plugins that configure the RDMA network:
# https://docs.oracle.com/en-us/iaas/Content/Compute/Tasks/manage-plugins.htm
PLUGINS = ("Compute HPC RDMA Authentication", "Compute HPC RDMA Auto-Configuration")


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

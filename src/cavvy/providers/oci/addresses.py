"""Finds the addresses of instances. OCI reports addresses with an instance's virtual network
interfaces, not with the instance itself
(https://docs.oracle.com/en-us/iaas/api/#/en/iaas/20160918/Vnic/).
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from cavvy.providers.oci.api import OciApi
from cavvy.providers.vm.cloud import CloudFault, SshTarget


class InstanceAddresses(NamedTuple):
    """The addresses of an instance's primary interface."""

    private: str  # for the other nodes of a gang: security lists mostly allow the subnet only
    ssh: SshTarget  # the public address, if the instance has one


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
        except CloudFault as fault:
            if fault.status != 404:  # the instance may have ended since
                raise
            return
        if vnic.get("isPrimary"):
            private = str(vnic["privateIp"])
            target = SshTarget(address=str(vnic.get("publicIp") or private))
            self.known[instance] = InstanceAddresses(private, target)

"""Finds the subnet of nodes in each region: the subnet that the settings name or, without one, a
subnet in a network that Cavvy creates once and keeps. Creates the availability sets that connect
machines by InfiniBand. Deletes sets without machines, and network interfaces and public addresses
that remain after a failed creation of a machine, because Azure bills a public address even if
nothing uses it.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta

from cavvy.catalog.networks import find_fabric
from cavvy.domain.offers import Purchase
from cavvy.domain.tasks import Fabric, Scalar
from cavvy.providers.azure.account import AzureAccount
from cavvy.providers.base import Refused
from cavvy.providers.vm.cloud import CloudFault, MachineRequest
from cavvy.providers.vm.records import INSTALLATION
from cavvy.providers.vm.rest import Json

_NETWORKS = "Microsoft.Network/virtualNetworks"
_GROUPS = "Microsoft.Network/networkSecurityGroups"
NO_FABRIC = "no InfiniBand"  # Cavvy's own code
_SUBNET, _ADDRESSES = "nodes", "10.77.0.0/16"
INTERFACES = "Microsoft.Network/networkInterfaces"
ADDRESSES = "Microsoft.Network/publicIPAddresses"
SETS = "Microsoft.Compute/availabilitySets"
# An address belongs to an interface or a NAT gateway. An interface belongs to a machine or a
# private endpoint. These fields contain the owner.
_USED_BY = {
    INTERFACES: ("virtualMachine", "privateEndpoint"),
    ADDRESSES: ("ipConfiguration", "natGateway"),
    SETS: ("virtualMachines",),
}
# The time between two checks. This time is longer than a creation takes, because Azure makes the
# interface before the machine.
_EVERY = timedelta(minutes=10)


class AzureNetworks:
    """Finds and creates subnets. The network security groups have only Azure's default rules: nodes
    of the network can reach each other, and connections from the Internet are refused; see
    https://learn.microsoft.com/azure/virtual-network/network-security-groups-overview
    """

    def __init__(self, account: AzureAccount, settings: Mapping[str, Scalar]) -> None:
        self._account = account
        self._named = _read_subnets(str(settings.get("subnets") or ""))
        self._made: dict[str, str] = {}

    async def subnet(self, region: str) -> str:
        """Return the resource id of the region's subnet. Raises CloudFault, Refused."""
        if region in self._named:
            return self._named[region]
        if region not in self._made:
            self._made[region] = await self._make(region)
        return self._made[region]

    def forget(self, region: str) -> None:
        """Discard the region's cached network, because a person may have deleted it. The next
        launch looks the network up, and creates it if it does not exist.
        """
        self._made.pop(region, None)

    async def _make(self, region: str) -> str:
        name = f"cavvy-{region}"
        network = await self._account.find(_NETWORKS, name)
        if network is None or _state(network) == "Failed":
            if await self._account.find(_GROUPS, name) is None:
                await self._account.put(_GROUPS, name, {"location": region, "properties": {}})
            properties = {
                "addressPrefix": _ADDRESSES,
                "networkSecurityGroup": {"id": await self._account.path(_GROUPS, name)},
            }
            body = {
                "location": region,
                "properties": {
                    "addressSpace": {"addressPrefixes": [_ADDRESSES]},
                    "subnets": [{"name": _SUBNET, "properties": properties}],
                },
            }
            network = await self._account.put(_NETWORKS, name, body)
        if _state(network) != "Succeeded":  # until then, Azure refuses machines in the network
            raise CloudFault(425, "NetworkNotReady", f"Azure is still creating the network {name}")
        return f"{await self._account.path(_NETWORKS, name)}/subnets/{_SUBNET}"


def _state(network: Json) -> str:
    return str((network.get("properties") or {}).get("provisioningState"))


def _read_subnets(text: str) -> Mapping[str, str]:
    found = {}
    for each in filter(None, (word.strip() for word in text.split(","))):
        region, sign, subnet = each.partition("=")
        if not sign or "/subnets/" not in subnet:
            raise Refused(f"[providers.azure] subnets: {each!r} is not REGION=RESOURCE-ID")
        found[region.strip()] = subnet.strip()
    return found


def needs_set(request: MachineRequest) -> bool:
    """Return whether the request is for a node of a gang that InfiniBand can connect. Raises
    CloudFault if the task wants InfiniBand between spot machines: Azure connects only machines of
    one availability set (https://learn.microsoft.com/azure/virtual-machines/sizes-hpc), which spot
    machines cannot be in (https://learn.microsoft.com/azure/virtual-machines/error-codes-spot).
    """
    offer, gang = request.offer, request.gang
    if gang.nodes == 1 or find_fabric("azure", offer.instance_type) is not Fabric.INFINIBAND:
        return False
    spot = offer.purchase is Purchase.SPOT
    if spot and gang.network is not None and gang.network.fabric is not None:
        why = "Azure connects no spot machines by InfiniBand"
        raise CloudFault(409, NO_FABRIC, f"{why}; on-demand machines of the size are connected")
    return not spot


async def make_set(account: AzureAccount, request: MachineRequest) -> str:
    """Return the id of the availability set of a gang, and create the set if it does not exist. A
    set costs nothing. Raises CloudFault, Refused.
    """
    name = request.names[0].rsplit("-", 2)[0]
    body = {
        "location": request.offer.region,
        "tags": dict(request.tags),
        "sku": {"name": "Aligned"},  # for machines with managed disks
        "properties": {"platformFaultDomainCount": 1, "platformUpdateDomainCount": 1},
    }
    try:
        await account.put(SETS, name, body)
    except CloudFault as fault:
        if fault.status == 403:
            raise Refused(
                f"{fault}; for InfiniBand between the nodes of a gang, the role needs the actions "
                f"read, write and delete of {SETS}"
            ) from fault
        raise
    return await account.path(SETS, name)


class AzureLeftovers:
    """Deletes network interfaces, addresses and availability sets that belonged to no machine in
    two successive checks, ten minutes apart. Checks only those with the installation's tag.
    """

    def __init__(self, account: AzureAccount, mark: str, now: Callable[[], datetime]) -> None:
        self._account, self._mark, self._now = account, mark, now
        self._next: datetime | None = None
        # (type, name) of the unused parts that the last check found
        self._unused: set[tuple[str, str]] = set()

    async def sweep(self) -> None:
        """Run the check, unless the last check was less than ten minutes ago. Raises CloudFault,
        Refused.
        """
        now = self._now()
        if self._next is not None and now < self._next:
            return
        self._next = now + _EVERY
        found = {
            (kind, str(each["name"]))
            for kind, fields in _USED_BY.items()
            for each in await self._list(kind)
            if (each.get("tags") or {}).get(INSTALLATION) == self._mark
            and not any((each.get("properties") or {}).get(field) for field in fields)
        }
        late, self._unused = found & self._unused, found
        # interfaces are deleted first, because they use the addresses
        for kind, name in sorted(late):
            with suppress(CloudFault):  # the next check tries again
                await self._account.delete(kind, name)

    async def _list(self, kind: str) -> Sequence[Json]:
        try:
            return await self._account.resources(kind)
        except CloudFault as fault:
            if kind == SETS and fault.status == 403:  # a role without InfiniBand
                return ()
            raise

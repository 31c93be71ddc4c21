"""Gives the nodes of a gang all network interfaces of their GPUs: A3 with eight GPUs, A4 and A4X.

Each interface of the usual kind must be in a network of its own, and the interfaces of RDMA cards
are all in one network with the zone's RDMA profile
(https://cloud.google.com/vpc/docs/rdma-network-profiles). Cavvy creates these networks once and
keeps them; they cost nothing. Google creates networks in the background, so a launch is repeated
until they exist.
"""

from collections.abc import Sequence

from cavvy.domain.offers import Offer
from cavvy.providers.base import Refused
from cavvy.providers.gcp.api import QUOTA_CODES, GcpApi, read_operation
from cavvy.providers.vm.cloud import CloudFault
from cavvy.providers.vm.rest import Json

# The interfaces of a machine besides the first one: of the usual kind, and of RDMA cards
# (https://cloud.google.com/compute/docs/gpus/gpu-network-bandwidth).
_CARDS = {
    "a3-highgpu-8g": (4, 0),
    "a3-megagpu-8g": (8, 0),
    "a3-ultragpu-8g": (1, 8),
    "a4-highgpu-8g": (1, 8),
    "a4x-highgpu-4g": (1, 4),
}
# MTUs of GPUDirect: https://cloud.google.com/compute/docs/gpus/gpudirect and RDMA profiles
_MTU, _RDMA_MTU = 8244, 8896
# The ranges of subnets overlap neither with each other nor with those of Google's network `default`
# (10.128.0.0/9).
_RANGE, _RDMA_RANGE = "172.{}.0.0/16", "192.168.{}.0/21"


def has_gpu_networks(machine_type: str) -> bool:
    """Return whether the machines have interfaces for their GPUs."""
    return machine_type in _CARDS


class GpuNetworks:
    """Finds and creates the networks. Raises CloudFault, with the status 425 until they exist, and
    Refused."""

    def __init__(self, api: GcpApi) -> None:
        self._api = api
        self._ready: set[tuple[str, str]] = set()  # zone, machine type
        self._operations: dict[str, str] = {}  # path of a missing resource -> path of its operation

    def forget(self) -> None:
        """Look the networks up again, because a person may have deleted one."""
        self._ready.clear()

    async def interfaces(self, offer: Offer) -> Sequence[Json]:
        """Return a machine's interfaces besides the first one."""
        zone, region, kind = str(offer.zone), offer.region, offer.instance_type
        usual, cards = _CARDS[kind]
        names = [f"cavvy-{region}-{number}" for number in range(1, usual + 1)]
        rdma = f"cavvy-{zone}-rdma"
        subnets = [f"{rdma}-{number}" for number in range(1, cards + 1)]
        if (zone, kind) not in self._ready:
            networks = [{"name": each, "mtu": _MTU} for each in names]
            if cards:
                path = f"projects/{await self._api.project()}/global/networkProfiles"
                profile = {"networkProfile": f"{path}/{zone}-vpc-roce"}
                networks.append({"name": rdma, "mtu": _RDMA_MTU, **profile})
            bodies = [{**each, "autoCreateSubnetworks": False} for each in networks]
            await self._make({"global/networks": bodies})
            await self._make_parts(region, names, rdma, subnets)
            self._ready.add((zone, kind))
        return [
            *({**_name(region, each, each), "nicType": "GVNIC"} for each in names),
            *({**_name(region, rdma, each), "nicType": "MRDMA"} for each in subnets),
        ]

    async def _make_parts(
        self, region: str, names: Sequence[str], rdma: str, subnets: Sequence[str]
    ) -> None:
        """Create the subnets, and the rules that let nodes connect to each other. A network with an
        RDMA profile has such a rule."""
        ranges = {each: _RANGE.format(20 + at) for at, each in enumerate(names)}
        rdma_ranges = {each: _RDMA_RANGE.format(128 + 8 * at) for at, each in enumerate(subnets)}
        parts = [(each, each, cidr) for each, cidr in ranges.items()]
        parts += [(each, rdma, cidr) for each, cidr in rdma_ranges.items()]
        bodies = [
            {"name": each, "network": f"global/networks/{network}", "ipCidrRange": cidr}
            for each, network, cidr in parts
        ]
        rules = [
            {
                "name": each,
                "network": f"global/networks/{each}",
                "direction": "INGRESS",
                "sourceRanges": [cidr],
                "allowed": [{"IPProtocol": "all"}],
            }
            for each, cidr in ranges.items()
        ]
        await self._make({f"regions/{region}/subnetworks": bodies, "global/firewalls": rules})

    async def _make(self, wanted: dict[str, list[Json]]) -> None:
        """Request the resources that do not exist. Raises CloudFault unless all exist."""
        missing = [
            f"{kind}/{each['name']}"
            for kind, bodies in wanted.items()
            for each in bodies
            if not await self._exists(kind, each)
        ]
        if missing:
            names = ", ".join(each.rpartition("/")[2] for each in missing)
            raise CloudFault(425, "NetworksNotReady", f"Google creates the networks {names}")

    async def _exists(self, kind: str, body: Json) -> bool:
        path = f"{kind}/{body['name']}"
        # Another launch may ask at the same time, and Google forgets operations after two weeks.
        if operation := self._operations.pop(path, ""):
            fault = await self._read_end(operation)
            if fault is not None and fault.uncertain:
                self._operations[path] = operation
                return False
            if fault is not None:
                raise fault
        try:
            await self._api.get(path)
        except CloudFault as fault:
            if fault.status != 404:
                raise
        except Refused:  # what the API says of a network that does not exist
            pass
        else:
            return True
        await self._request(kind, body, path)
        return False

    async def _read_end(self, operation: str) -> CloudFault | None:
        try:
            return read_operation(await self._api.get(operation))
        except CloudFault as fault:
            if fault.status != 404:
                raise
            return None

    async def _request(self, kind: str, body: Json, path: str) -> None:
        try:
            operation = await self._api.send("POST", kind, body)
        except CloudFault as fault:
            if fault.status == 409:  # another server requests it
                return
            if fault.status == 403 and fault.code not in QUOTA_CODES:
                raise Refused(
                    f"[providers.gcp]: {fault}; let the account create networks, subnetworks and "
                    "firewall rules (docs/guides/gcp.md), or set `gpu_networks` to false, which "
                    "gives the nodes of a gang one interface"
                ) from fault
            raise
        self._operations[path] = f"{kind.rpartition('/')[0]}/operations/{operation['name']}"


def _name(region: str, network: str, subnet: str) -> dict[str, object]:
    return {
        "network": f"global/networks/{network}",
        "subnetwork": f"regions/{region}/subnetworks/{subnet}",
    }

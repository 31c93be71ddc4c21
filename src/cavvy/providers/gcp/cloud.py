"""Implements `Cloud` for Google Compute Engine.

One `instances.insert` call creates one machine; the call's token (`requestId`) is derived from the
machine's name. The request starts an operation, and only the operation reports that a zone has no
capacity. A launch is complete only when all its operations have succeeded. While an operation is
running, `create` raises a fault that means that the result is unknown, and the next call of
`create` queries the operations again.
"""

import uuid
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime

from cavvy.domain.offers import Offer, Quota
from cavvy.domain.values import replace
from cavvy.providers.base import ProviderContext, ProviderError, Refused
from cavvy.providers.gcp.api import FULL_CODES, QUOTA_CODES, GcpApi, last_part, read_operation
from cavvy.providers.gcp.credentials import GoogleCredentials
from cavvy.providers.gcp.instance import find_default, make_instances
from cavvy.providers.gcp.market import GcpMarket, GcpQuotas
from cavvy.providers.gcp.price_list import GcpPrices, LivePrices, read_live
from cavvy.providers.prices import PriceQuery
from cavvy.providers.required_images import require_images
from cavvy.providers.vm import cloud as vm
from cavvy.providers.vm.cloud import CloudFault
from cavvy.providers.vm.keys import list_setting
from cavvy.providers.vm.launch import start_together
from cavvy.providers.vm.records import INSTALLATION
from cavvy.providers.vm.rest import Json

# https://cloud.google.com/compute/docs/instances/instance-lifecycle
_STATES = {
    "PROVISIONING": vm.MachineState.REQUESTED,  # Google has not found capacity yet
    "STAGING": vm.MachineState.STARTING,
    "STOPPED": vm.MachineState.STOPPED,
    "TERMINATED": vm.MachineState.STOPPED,
    "SUSPENDED": vm.MachineState.STOPPED,
}
_PRICES_TIMEOUT_S = 20.0  # time limit for one page of Google's list of prices
_PREEMPTED, _DELETED = "compute.instances.preempted", "delete"


class GcpCloud:
    """Implements `Cloud`."""

    # Limits of names and labels: https://cloud.google.com/compute/docs/naming-resources and
    # https://cloud.google.com/compute/docs/labeling-resources. A value of metadata has at most 256
    # KiB: https://cloud.google.com/compute/docs/metadata/setting-custom-metadata#limitations.
    # Google bills a machine while it runs
    # (https://cloud.google.com/compute/docs/instances/instance-lifecycle); one that is off
    # costs only its disk, until the server deletes it.
    traits = vm.CloudTraits(
        name_limit=63,
        tags=True,
        tokens=True,
        atomic_count=True,
        user_data_limit=256 * 1024,
        bill_starts=vm.BillStart.RUNNING,
        bill_ends=vm.BillEnd.SHUTDOWN,
        quota_codes=QUOTA_CODES,
    )

    def __init__(self, context: ProviderContext) -> None:
        settings, now = context.settings, context.now
        self._settings = settings
        self._credentials = GoogleCredentials(settings)
        self._api = GcpApi(settings, self._credentials)
        self._prices = GcpPrices(
            base=str(settings["prices_endpoint"]),
            timeout_s=_PRICES_TIMEOUT_S,
            tries=2,
            credentials=self._credentials,
        )
        self._now = now
        self._market = GcpMarket(self._api, context, self._read_live)
        self._gpu_networks = GpuNetworks(self._api)
        self._quotas = GcpQuotas(self._api, list_setting(settings, "regions"), now)
        self._operations: dict[str, Json] = {}  # machine -> its insertion that has not ended
        # machine -> the number of its insertions that failed with an error that a repetition may
        # avoid
        self._failed: dict[str, int] = {}
        self.close = self._api.close

    def identity(self) -> Sequence[tuple[str, str]]:
        """Return facts for `cavvy check`. Call `offers` first: `offers` records the machine types
        that Cavvy cannot offer, and `identity` lists these types.
        """
        left_out = {
            "machine types without a known price": self._market.unpriced,
            "machine types with GPUs that are not in the catalog": self._market.differing,
        }
        told = [(what, ", ".join(types)) for what, types in left_out.items() if types]
        return [
            ("project", self._credentials.project()),
            ("credentials", self._credentials.describe()),
            *told,
            *([("quotas", self._quotas.problem)] if self._quotas.problem else []),
            *([("prices", _explain_silence(self._market.silent))] if self._market.silent else []),
        ]

    async def offers(self) -> Sequence[Offer]:
        """Return the offers that fit within the quotas. If the quotas cannot be read, all offers
        are returned.
        """
        offers = require_images(
            await self._market.offers(), self._settings.get("image"), find_default
        )
        return await self._quotas.limit(offers, self._market.gpus)

    async def quotas(self) -> Sequence[Quota]:
        return await self._quotas.read()

    def _read_live(self) -> LivePrices:
        """Read Google's price list. Blocks. Raises PriceError if the list cannot be read."""
        query = PriceQuery(machines={}, today=self._now().date(), progress=_ignore, pause=_ignore)
        return read_live(self._prices.list_skus(query), query.today)

    async def create(self, request: vm.MachineRequest) -> Sequence[str]:
        """Request all machines of a gang at the same time. If one request fails permanently, delete
        the machines of the other requests. A machine that cannot be deleted now is found by its
        name and deleted later.
        """
        zone = request.offer.zone
        more: Sequence[Json] = ()
        many = self._settings["gpu_networks"] and request.gang.nodes > 1
        if many and has_gpu_networks(request.offer.instance_type):
            more = await self._gpu_networks.interfaces(request.offer)
        bodies = make_instances(request, self._settings, more)
        self._quotas.forget()
        machines = [f"{zone}/{name}" for name in request.names]
        starts = {
            each: self._advance(each, body, request.token)
            for each, body in zip(machines, bodies, strict=True)
        }
        try:
            await start_together(starts, self._roll_back)
        except vm.CloudFault as fault:
            if not fault.uncertain:
                self._gpu_networks.forget()
            raise
        except ProviderError:  # also if a network does not exist
            self._gpu_networks.forget()
            raise
        return machines

    async def list(self) -> Sequence[vm.CloudMachine]:
        """Return all machines with Cavvy's label, in the zones that Google reaches. If the reason
        why a spot machine stopped cannot be read, the machine is listed as stopped, without a
        reason.
        """
        query = {"filter": f"labels.{INSTALLATION}:*"}
        told, lost = await self._api.aggregated_parts("instances", **query)
        found = []
        for each in told:
            machine = _read(each)
            if machine.state is vm.MachineState.STOPPED and _is_spot(each):
                end = None
                # removals must not fail for lack of a reason
                with suppress(vm.CloudFault, ProviderError):
                    end = await self._read_end(machine.id)
                if end is not None and end.preempted:
                    machine = replace(machine, preempted=True, reason=end.reason)
            found.append(machine)
        if lost:
            regions = {each.rpartition("-")[0] for each in lost}
            fault = vm.CloudFault(
                0,
                "UNREACHABLE",
                f"Google reported that it cannot reach its zones {', '.join(lost)}",
            )
            raise vm.SilentRegions(found, dict.fromkeys(sorted(regions), fault))
        return found

    async def get(self, machine: str) -> vm.CloudMachine | None:
        """Return the machine. If the machine no longer exists, look up in the zone's operations
        when and why it ended.
        """
        zone, _, name = machine.partition("/")
        try:
            return _read(await self._api.get(f"zones/{zone}/instances/{name}"))
        except vm.CloudFault as fault:
            if fault.status != 404:
                raise
        return await self._read_end(machine)

    async def delete(self, machine: str) -> None:
        zone, _, name = machine.partition("/")
        self._quotas.forget()
        operation = await self._api.send("DELETE", f"zones/{zone}/instances/{name}")
        self._forget(machine)
        fault = read_operation(operation)
        if fault is not None and not fault.uncertain:
            raise fault

    def is_full(self, fault: vm.CloudFault) -> bool:
        return fault.code in FULL_CODES

    async def _advance(self, machine: str, body: Json, token: str) -> None:
        """Request the machine, or query the state of an earlier request for the machine. If the
        request has failed and the machine does not exist, raise the request's fault. `token` is
        another one after a recorded refusal, also if the server was restarted since.
        """
        zone = machine.partition("/")[0]
        operation = self._operations.get(machine)
        if operation is not None:
            path = f"zones/{zone}/operations/{operation['name']}"
            operation = await self._api.get(path)
        else:
            # a repeated ID would return the failed insertion, so the ID depends on the failures
            failed = self._failed.get(machine)
            request = f"{machine} {token} {failed}" if failed else f"{machine} {token}"
            request_id = str(uuid.uuid5(uuid.NAMESPACE_URL, request))
            try:
                path = f"zones/{zone}/instances"
                operation = await self._api.send("POST", path, body, requestId=request_id)
            except vm.CloudFault as fault:
                if fault.status != 409 or await self.get(machine) is None:
                    raise
                return  # an earlier request, whose reply was lost, made the machine
        problem = read_operation(operation)
        if problem is not None and problem.uncertain:
            self._operations[machine] = operation
            raise problem
        self._operations.pop(machine, None)
        if problem is not None:
            self._failed[machine] = self._failed.get(machine, 0) + 1
            raise problem

    def _forget(self, machine: str) -> None:
        self._operations.pop(machine, None)
        self._failed.pop(machine, None)

    async def _roll_back(self, machine: str) -> None:
        self._forget(machine)
        with suppress(vm.CloudFault, ProviderError):
            await self.delete(machine)

    async def _read_end(self, machine: str) -> vm.CloudMachine | None:
        """Return a deleted machine in its final state, or None if no operation reports that the
        machine ended.
        """
        zone, _, name = machine.partition("/")
        project = await self._api.project()
        link = f"projects/{project}/zones/{zone}/instances/{name}"
        told = await self._api.list(f"zones/{zone}/operations", filter=f'targetLink eq ".*/{link}"')
        ends = {
            str(each["operationType"]): each
            for each in told
            if each.get("operationType") in (_PREEMPTED, _DELETED) and not each.get("error")
        }
        if not ends:
            return None
        preempted = _PREEMPTED in ends
        end = ends.get(_PREEMPTED) or ends[_DELETED]
        at = end.get("endTime") or end["insertTime"]
        return vm.CloudMachine(
            id=machine,
            name=name,
            state=vm.MachineState.ENDED,
            ended_at=datetime.fromisoformat(at),
            preempted=preempted,
            reason="Compute Engine preempted the machine"
            if preempted
            else "the machine was deleted",
        )


def _ignore(_: object) -> None:
    """Stand in for the functions with which a client library sleeps and reports progress, since a
    provider does neither.
    """


def _explain_silence(problem: str) -> str:
    return f"Cavvy uses the catalog's prices, without disks and addresses: {problem}"


def _is_spot(told: Json) -> bool:
    return bool((told.get("scheduling") or {}).get("provisioningModel") == "SPOT")


def _read(told: Json) -> vm.CloudMachine:
    status = str(told["status"])
    interfaces = told.get("networkInterfaces") or [{}]
    state = _STATES.get(status, vm.MachineState.RUNNING)  # unknown states may be billed
    stopped = told.get("lastStopTimestamp") if state is vm.MachineState.STOPPED else None
    return vm.CloudMachine(
        id=f"{last_part(str(told['zone']))}/{told['name']}",
        name=str(told["name"]),
        state=state,
        address=interfaces[0].get("networkIP"),
        tags=dict(told.get("labels") or {}),
        created_at=datetime.fromisoformat(
            told.get("lastStartTimestamp") or told["creationTimestamp"]
        ),
        ended_at=datetime.fromisoformat(stopped) if stopped else None,
        reason="" if status in ("RUNNING", *_STATES) and not stopped else _reason(told),
    )


def _reason(told: Json) -> str:
    return str(told.get("statusMessage") or f"Compute Engine reports: {told['status']}")


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
    """Gives the nodes of a gang all network interfaces of their GPUs: A3 with eight GPUs, A4 and
    A4X. Raises CloudFault, with the status 425 until the networks exist, and Refused.

    Each interface of the usual kind must be in a network of its own, and the interfaces of RDMA
    cards are all in one network with the zone's RDMA profile
    (https://cloud.google.com/vpc/docs/rdma-network-profiles). Cavvy creates these networks once and
    keeps them; they cost nothing. Google creates networks in the background, so a launch is
    repeated until they exist.
    """

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

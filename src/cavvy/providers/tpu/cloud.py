"""Implements `Cloud` for Google Cloud TPU. A machine is one host of a slice. A slice is one node of
the API: one request creates all hosts of the slice, and one request deletes them.

The TPU API calls the hosts of a slice workers, and numbers them from 0. Rank r of a gang is the
worker r % HOSTS of slice r // HOSTS, where HOSTS is `Offer.hosts`. A slice has the name of its
first rank.

Each request for a node starts an operation. If a zone has no capacity, the node disappears, and
only the operation reports the reason. If a node is missing, the provider looks for the node's
operation in the list of the zone's operations.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta

from cavvy.catalog.tpu_slices import find_slice
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.values import replace
from cavvy.providers.base import GangSpec, NodeEndpoint, ProviderContext, ProviderError, Refused
from cavvy.providers.gcp.credentials import GoogleCredentials
from cavvy.providers.hosts.userdata import MetadataService, make_user_data
from cavvy.providers.tpu.api import FULL, QUOTA, TpuApi, ended_at, last_part, read_operation
from cavvy.providers.tpu.market import TpuMarket, TpuQuotas
from cavvy.providers.vm import cloud as vm
from cavvy.providers.vm.launch import start_together
from cavvy.providers.vm.records import INSTALLATION, is_machine_name
from cavvy.providers.vm.rest import Json

# https://cloud.google.com/tpu/docs/reference/rest/v2/projects.locations.nodes#state
_STATES = vm.StateNames(
    starting="CREATING STARTING RESTARTING REIMAGING",
    stopped="STOPPING STOPPED PREEMPTED TERMINATED",
    ended="DELETING",
)
# The runtimes for JAX and PyTorch: https://cloud.google.com/tpu/docs/runtimes, read on 2026-11-23
_RUNTIMES = {
    "TPU-v6e": "v2-alpha-tpuv6e",
    "TPU-v5p": "v2-alpha-tpuv5",
    "TPU-v5e": "v2-alpha-tpuv5-lite",
}
# https://google.aip.dev/193; names contain the launch, so no other gang has this name
_EXISTS = "ALREADY_EXISTS"
_OLD_RUNTIME = "tpu-ubuntu2204-base"
_DELETED_AGE = timedelta(minutes=1)  # time before an accepted deletion is requested again
# The number of the worker. Google's own programs read it there, such as Ray's and PyTorch/XLA's
# (https://github.com/pytorch/xla), on 2026-11-23.
_WORKER = "http://169.254.169.254/computeMetadata/v1/instance/attributes/agent-worker-number"


class TpuCloud:
    """Implements `Cloud`."""

    # A node's name is unique in its zone, so names serve as tokens. Labels are those of Compute
    # Engine. The limit of names is an assumption, since Google does not document it. Google bills a
    # node in the state READY only: https://cloud.google.com/tpu/pricing
    traits = vm.CloudTraits(
        name_limit=61,
        tags=True,
        tokens=True,
        atomic_count=True,
        user_data_limit=256 * 1024,
        bill_starts=vm.BillStart.RUNNING,
        quota_codes=frozenset({QUOTA}),
    )

    def __init__(self, context: ProviderContext) -> None:
        settings, now = context.settings, context.now
        self._settings, self._now = settings, now
        self._credentials = GoogleCredentials(settings, "tpu")
        self._api = TpuApi(settings, self._credentials)
        self._market = TpuMarket(self._api, context)
        self._deleted: dict[str, datetime] = {}  # slice -> when its deletion was accepted
        self.close = self._api.close
        self._quotas = TpuQuotas(self._api, now)
        self.quotas = self._quotas.read
        self.make_script = ScriptMaker(context.node_endpoint)

    def identity(self) -> Sequence[tuple[str, str]]:
        """Return facts for `cavvy check`."""
        facts = [
            ("project", self._credentials.project()),
            ("credentials", self._credentials.describe()),
        ]
        return [*facts, *([("quotas", problem)] if (problem := self._quotas.problem) else [])]

    async def offers(self) -> Sequence[Offer]:
        """Return the offers of all zones that answer, limited by the unused quotas. Raises
        CloudFault or Refused if no zone answers.
        """
        return await self._quotas.limit(await self._market.offers())

    def silent(self) -> Sequence[str]:
        """See `HasParts.silent`."""
        return self._market.silent

    async def create(self, request: vm.MachineRequest) -> Sequence[str]:
        """Request all slices of a gang at the same time. If one request fails permanently, delete
        the other slices.
        """
        zone, hosts = request.offer.zone, request.offer.hosts
        if request.gang.nodes % hosts:
            raise Refused(
                f"nodes: a slice {request.offer.instance_type} has {hosts} hosts, so the number of "
                f"nodes must be a multiple of {hosts}, not {request.gang.nodes}"
            )
        self._quotas.forget()
        scripts = {
            slice_name(name, hosts): data
            for name, data in zip(request.names, request.user_data, strict=True)
        }
        starts = {
            f"{zone}/{name}": self._start(request, name, data) for name, data in scripts.items()
        }
        await start_together(starts, self._roll_back)
        return [_make_id(str(zone), name, hosts) for name in request.names]

    async def list(self) -> Sequence[vm.CloudMachine]:
        """Return the hosts of all slices that have Cavvy's label. If Google reports unreachable
        zones, raise SilentRegions with the hosts of the other zones.
        """
        told, lost = await self._api.list("locations/-/nodes", "nodes")
        found = [
            machine
            for each in told
            if INSTALLATION in (each.get("labels") or {})
            and is_machine_name(last_part(each["name"]))
            for machine in _read(each)
        ]
        if lost:
            regions = sorted({each.rpartition("-")[0] for each in lost})
            fault = vm.CloudFault(
                0,
                "UNREACHABLE",
                f"Google reported that it cannot reach its zones {', '.join(lost)}",
            )
            raise vm.SilentRegions(found, dict.fromkeys(regions, fault))
        return found

    async def get(self, machine: str) -> vm.CloudMachine | None:
        """Return the host. If the host's slice no longer exists, the time when the slice ended is
        read from the zone's operations.
        """
        zone, name, worker = machine.split("/")
        try:
            return _read(await self._api.get(f"locations/{zone}/nodes/{name}"))[int(worker)]
        except vm.CloudFault as fault:
            if fault.status != 404:
                raise
        return await self._read_end(zone, name, int(worker))

    async def delete(self, machine: str) -> None:
        """Delete the host's slice, unless the deletion was just requested for another host of the
        slice. Google may refuse a second request to delete a slice.
        """
        now, place = self._now(), machine.rpartition("/")[0]
        self._deleted = {each: at for each, at in self._deleted.items() if now - at < _DELETED_AGE}
        if place in self._deleted:
            return
        zone, name = place.split("/")
        path = f"locations/{zone}/nodes/{name}"
        try:
            operation = await self._api.send("DELETE", path)
        except vm.CloudFault as fault:
            if fault.status not in (400, 409):
                raise
            if (await self._api.get(path))["state"] != "DELETING":
                raise
        else:
            if (failed := read_operation(operation)) is not None:
                raise failed
        self._deleted[place] = now
        self._quotas.forget()

    def is_full(self, fault: vm.CloudFault) -> bool:
        return fault.code == FULL

    async def _start(self, request: vm.MachineRequest, name: str, script: str) -> None:
        """Request one slice, and return once the slice exists. If the slice could not be created,
        raise the fault of the request.
        """
        zone, body = request.offer.zone, self._make_body(request, script)
        self._deleted.pop(f"{zone}/{name}", None)
        try:
            operation = await self._api.send("POST", f"locations/{zone}/nodes", body, nodeId=name)
        except vm.CloudFault as fault:
            if fault.code != _EXISTS:
                raise
            return  # an earlier request, whose reply was lost, made it
        if (failed := read_operation(operation)) is not None:
            raise failed

    def _make_body(self, request: vm.MachineRequest, script: str) -> Mapping[str, Json]:
        offer, settings = request.offer, self._settings
        runtime = request.gang.options.get("runtime") or settings.get("runtime")
        network: dict[str, Json] = {
            "network": str(settings["network"]),
            "enableExternalIps": bool(settings["external_address"]),
        }
        if settings.get("subnetwork"):
            network["subnetwork"] = str(settings["subnetwork"])
        body: dict[str, Json] = {
            "acceleratorType": offer.instance_type.removeprefix("tpu-"),
            "runtimeVersion": str(runtime or _RUNTIMES.get(offer.accelerator or "", _OLD_RUNTIME)),
            "labels": dict(request.tags),
            "metadata": {"startup-script": script},
            "networkConfig": network,
        }
        if offer.purchase is Purchase.SPOT:
            body["schedulingConfig"] = {"spot": True}
        if settings.get("service_account"):
            scopes = ["https://www.googleapis.com/auth/cloud-platform"]
            body["serviceAccount"] = {"email": settings["service_account"], "scope": scopes}
        return body

    async def _roll_back(self, place: str) -> None:
        with suppress(vm.CloudFault, ProviderError):
            await self.delete(f"{place}/0")

    async def _read_end(self, zone: str, name: str, worker: int) -> vm.CloudMachine | None:
        """Return the state of a host whose slice does not exist, as read from the operations of the
        slice, or None if the slice has no operations.
        """
        told, _ = await self._api.list(f"locations/{zone}/operations", "operations")
        ours = [each for each in told if _target(each) == f"{zone}/{name}"]
        if not ours:
            return None
        machine = vm.CloudMachine(
            id=f"{zone}/{name}/{worker}", name=rename(name, worker), state=vm.MachineState.ENDED
        )
        for each in ours:
            if _verb(each) == "delete" and each.get("done") and not each.get("error"):
                return replace(machine, reason="the node was deleted", ended_at=ended_at(each))
        for each in ours:
            failed = read_operation(each)
            if _verb(each) == "create" and failed is not None:
                # also as the time of its creation, because a slice that never ran is free
                at = ended_at(each)
                full = failed.code == FULL
                return replace(
                    machine, created_at=at, ended_at=at, reason=failed.message, no_capacity=full
                )
        return None


def _read(told: Json) -> Sequence[vm.CloudMachine]:
    """Return the hosts of a slice."""
    _, _, _, zone, _, name = str(told["name"]).split("/")
    status = str(told["state"])
    state = _STATES[status]
    kind = find_slice(str(told.get("acceleratorType") or ""))
    ends = told.get("networkEndpoints") or ()
    addresses = [each.get("ipAddress") for each in ends]
    spot = bool((told.get("schedulingConfig") or {}).get("spot"))
    quiet = state in (vm.MachineState.STARTING, vm.MachineState.RUNNING)
    return [
        vm.CloudMachine(
            id=f"{zone}/{name}/{worker}",
            name=rename(name, worker),
            state=state,
            address=addresses[worker] if worker < len(addresses) else None,
            tags=dict(told.get("labels") or {}),
            created_at=datetime.fromisoformat(told["createTime"]),
            preempted=status == "PREEMPTED" or (spot and status == "TERMINATED"),
            reason="" if quiet else f"Cloud TPU reports: {status}",
        )
        for worker in range(kind.hosts if kind else max(1, len(ends)))
    ]


def _make_id(zone: str, name: str, hosts: int) -> str:
    rank = int(name.rsplit("-", 2)[1])
    return f"{zone}/{slice_name(name, hosts)}/{rank % hosts}"


def _target(operation: Json) -> str:
    """Return the slice to which an operation applies, as ZONE/NAME."""
    parts = str((operation.get("metadata") or {}).get("target") or "").split("/")
    return f"{parts[3]}/{last_part(parts[-1])}" if len(parts) == 6 else ""


def _verb(operation: Json) -> str:
    return str((operation.get("metadata") or {}).get("verb") or "")


def first_rank(rank: int, hosts: int) -> int:
    """Return the first rank of the slice that contains this rank."""
    return rank - rank % hosts


def rename(name: str, step: int) -> str:
    """Return the name of the machine whose rank is higher by `step` than the rank in `name`. See
    `vm.records` for names.
    """
    head, rank, count = name.rsplit("-", 2)
    return f"{head}-{int(rank) + step}-{count}"


def slice_name(name: str, hosts: int) -> str:
    """Return the name of the slice to which the machine with this name belongs."""
    rank = int(name.rsplit("-", 2)[1])
    return rename(name, first_rank(rank, hosts) - rank)


def locate(offer: Offer, rank: int) -> MetadataService:
    """Return the metadata URL from which a host reads its rank, or, for a slice of one host, the
    rank itself.
    """
    if offer.hosts == 1:
        return MetadataService(rank=rank, address="")
    return MetadataService(
        rank=_WORKER,
        first_rank=first_rank(rank, offer.hosts),
        address="",
        headers={"Metadata-Flavor": "Google"},
    )


class ScriptMaker:
    """Builds the script of a slice. All hosts of a slice run this script."""

    def __init__(self, node_endpoint: NodeEndpoint | None) -> None:
        self._node_endpoint = node_endpoint

    async def __call__(self, gang: GangSpec, rank: int) -> str:
        if self._node_endpoint is None:
            raise Refused("hosts of TPUs must connect to the server; set `server.tls_listen`")
        metadata = locate(gang.offer, rank)
        return await asyncio.to_thread(make_user_data, gang, self._node_endpoint, metadata)

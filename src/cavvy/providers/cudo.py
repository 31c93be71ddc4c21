"""CUDO Compute: each node is one virtual machine that starts the agent on boot.

`CudoCloud` calls CUDO Compute's API, version 1 (https://www.cudocompute.com/docs/api).

A CUDO machine type describes a kind of host, not the size of a virtual machine. A request states
the number of GPUs, the number of vCPUs and the memory of a machine. The names of Cavvy's instance
types contain the GPUs, the vCPUs and the memory: "2x16x64.epyc-milan-rtx-a6000" has 2 GPUs, 16
vCPUs and 64 GiB of memory. The id of a machine is its name.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from decimal import Decimal

from cavvy.catalog.accelerators import KnownAccelerator, identify
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import Scalar
from cavvy.domain.units import parse_rate
from cavvy.providers.base import Feature, Refused
from cavvy.providers.settings import disk_setting, project_number, project_text, regions_setting
from cavvy.providers.vm import cloud as vm
from cavvy.providers.vm.abilities import make_manifest, reach_setting
from cavvy.providers.vm.account import RestAccount, keep_ours
from cavvy.providers.vm.keys import ApiKeySource
from cavvy.providers.vm.rest import Json

KEYS = ApiKeySource(
    provider="cudo",
    variables=("CUDO_API_KEY",),
    made_at="https://compute.cudo.org (API keys)",
)
_REFERENCE = "https://www.cudocompute.com/docs/api/virtual-machines"
_TYPES = f"{_REFERENCE}/get-a-virtual-machine-type"

MANIFEST = make_manifest(
    "cudo",
    "CUDO Compute",
    cloud="cavvy.providers.cudo:CudoCloud",
    machine="a machine",
    deletion=_REFERENCE,
    rights="an API key of a user who may read the project and manage its virtual machines",
    unsupported={
        Feature.SPOT: f"CUDO sells on-demand and committed machines only ({_TYPES})",
        Feature.CAPACITY: "CUDO reports the free GPUs, vCPUs and memory, but not how many machines "
        f"fit ({_TYPES})",
        Feature.SELF_END: "a machine can be terminated only with an API key "
        f"({_REFERENCE}/create-a-virtual-machine); nodes get no key, because with a key, a node "
        "could terminate all machines of the project",
        Feature.VOLUMES: f"{_REFERENCE}/create-a-virtual-machine",
        Feature.NETWORK: f"CUDO's API does not report the speed of the network ({_TYPES})",
        Feature.DISK: "the setting `disk_gib` selects the size of the disk for all machines "
        f"({_REFERENCE}/create-a-virtual-machine)",
        Feature.NOTICE: f"{_REFERENCE}/get-a-virtual-machine",
    },
    settings=(
        KEYS.setting(),
        project_text(
            "project", "The project of the machines. The default is the account's only project."
        ).for_setup(),
        regions_setting("data centers"),
        project_text(
            "image",
            "The public image of machines, by id. The default is the newest Ubuntu image with "
            "NVIDIA's driver.",
        ),
        project_number(
            "gpu_vcpus",
            "The number of vCPUs per GPU, unless the machine type requires more or fewer.",
            unit="vCPUs",
            default=8,
            minimum=1,
            whole=True,
        ),
        project_number(
            "gpu_memory_gib",
            "The memory per GPU, unless the machine type requires more or less.",
            unit="GiB",
            default=32,
            minimum=1,
            whole=True,
        ),
        disk_setting("The size of a machine's disk.", 100, minimum=10),
        reach_setting(),
    ),
    endpoint="https://rest.compute.cudo.org/v1",
)


# The API does not describe its errors for missing capacity. These words are assumptions.
# Only the message tells missing capacity from a wrong value.
_FULL = re.compile(r"capacity|available|resources|no host", re.IGNORECASE)
_COUNTS = (1, 2, 4, 8)  # machines with these numbers of GPUs are offered
_IMAGE = re.compile(r"ubuntu-\d+-nvidia-\d+.*")
_TYPE = re.compile(r"(\d+)x(\d+)x(\d+)\.(.+)")  # the form of an instance type


class CudoCloud:
    """Implements `Cloud`."""

    traits = vm.CloudTraits()

    def __init__(self, settings: Mapping[str, Scalar], now: Callable[[], datetime]) -> None:
        self.account = RestAccount(settings, now, KEYS, _read_error)
        self._api = self.account.api
        self._project = str(settings.get("project") or "")

    async def offers(self) -> Sequence[Offer]:
        told = (await self._api.get("/vms/machine-types-2"))["machineTypes"]
        kinds = [each for each in told if each.get("gpuModel")]
        models = (await self._api.get("/vms/gpu-models"))["gpuModels"]
        sizes = {str(each["id"]): int(each.get("memoryGib") or 0) * 1024 for each in models}
        self.account.note_unknown(
            str(each["gpuModel"]) for each in kinds if _identify(each, sizes) is None
        )
        return [
            offer
            for each in kinds
            if (known := _identify(each, sizes)) and self.account.allows(str(each["dataCenterId"]))
            for offer in self._list_offers(each, known)
        ]

    async def create(self, request: vm.MachineRequest) -> Sequence[str]:
        kind = _TYPE.fullmatch(request.offer.instance_type)
        if kind is None:
            raise vm.CloudFault(400, "unknown instance type", request.offer.instance_type)
        body = {
            "vmId": request.names[0],
            "dataCenterId": request.offer.region,
            "machineType": kind[4],
            "gpus": int(kind[1]),
            "vcpus": int(kind[2]),
            "memoryGib": int(kind[3]),
            "bootDisk": {"sizeGib": int(self.account.settings["disk_gib"])},
            "bootDiskImageId": await self._choose_image(),
            "startScript": request.user_data[0],
            "sshKeySource": "SSH_KEY_SOURCE_NONE",
            "customSshKeys": [request.public_key] if request.public_key else [],
        }
        told = await self._api.send("POST", f"{await self._root()}/vm", body)
        return [str(told["id"])]

    async def list(self) -> Sequence[vm.CloudMachine]:
        found = (await self._api.get(f"{await self._root()}/vms"))["VMs"]
        return [_read(each) for each in keep_ours(found, "id")]

    async def get(self, machine: str) -> vm.CloudMachine | None:
        return _read((await self._api.get(f"{await self._root()}/vms/{machine}"))["VM"])

    async def delete(self, machine: str) -> None:
        await self._api.send("POST", f"{await self._root()}/vms/{machine}/terminate")

    def is_full(self, fault: vm.CloudFault) -> bool:
        return fault.refuses(_FULL)

    async def _root(self) -> str:
        """Return the path of the project. Raises Refused if the project is not known."""
        if not self._project:
            projects = [str(each["id"]) for each in (await self._api.get("/projects"))["projects"]]
            if len(projects) != 1:
                raise Refused(
                    f"[providers.cudo] project: the account has {len(projects)} projects; "
                    "set the id of one"
                )
            self._project = projects[0]
        return f"/projects/{self._project}"

    async def _choose_image(self) -> str:
        if wanted := str(self.account.settings.get("image") or ""):
            return wanted
        told = (await self._api.get("/vms/public-images"))["images"]
        fit = [str(each["id"]) for each in told if _IMAGE.fullmatch(str(each["id"]))]
        if not fit:
            raise Refused("[providers.cudo] image: CUDO lists no Ubuntu image with NVIDIA's driver")
        return max(fit, key=lambda name: ([int(n) for n in re.findall(r"\d+", name)], name))

    def _list_offers(self, kind: Json, known: KnownAccelerator) -> Iterator[Offer]:
        """Yield the offers of one machine type in one data center: one for each number of GPUs."""
        disk_gib = int(self.account.settings["disk_gib"])
        for gpus in _COUNTS:
            vcpus, memory_gib = self._fit(kind, gpus)
            needs = {"Gpu": gpus, "Vcpu": vcpus, "MemoryGib": memory_gib, "StorageGib": disk_gib}
            if any(int(kind[f"max{name}Free"]) < need for name, need in needs.items()):
                continue
            parts = {"gpu": gpus, "vcpu": vcpus, "memoryGib": memory_gib}
            parts |= {"minStorageGib": disk_gib, "ipv4": 1}
            usd = sum(Decimal(kind[f"{name}PriceHr"]["value"]) * n for name, n in parts.items())
            yield Offer(
                provider="cudo",
                region=str(kind["dataCenterId"]),
                instance_type=f"{gpus}x{vcpus}x{memory_gib}.{kind['machineType']}",
                accelerator=known.accelerator.name,
                accelerator_count=gpus,
                accelerator_memory_mib=known.memory_mib or 0,
                vcpus=vcpus,
                memory_mib=memory_gib * 1024,
                disk_gib=disk_gib,
                rate=parse_rate(usd),
                architecture="x86_64",
                source="CUDO API",
                as_of=self.account.now().date(),
            )

    def _fit(self, kind: Json, gpus: int) -> tuple[int, int]:
        """Return the vCPUs and the memory in GiB of a machine with `gpus` GPUs: the values from the
        settings, within the limits of the machine type.
        """
        vcpus = int(self.account.settings["gpu_vcpus"]) * gpus
        if most := kind["maxVcpuPerGpu"]:
            vcpus = min(vcpus, math.floor(most * gpus))
        vcpus = max(vcpus, math.ceil(kind["minVcpuPerGpu"] * gpus), math.ceil(kind["minVcpu"]))
        memory_gib = int(self.account.settings["gpu_memory_gib"]) * gpus
        if least := kind["minVcpuPerMemoryGib"]:
            memory_gib = min(memory_gib, math.floor(vcpus / least))
        if most := kind["maxVcpuPerMemoryGib"]:
            memory_gib = max(memory_gib, math.ceil(vcpus / most))
        return vcpus, max(memory_gib, math.ceil(kind["minMemoryGib"]))


def _identify(kind: Json, sizes: Mapping[str, int]) -> KnownAccelerator | None:
    """Return the GPU of a machine type. `sizes` maps the id of a GPU model to its memory sizes in
    MiB. Return None if the GPU or its memory size is not known.
    """
    known = identify(str(kind["gpuModel"]), sizes.get(str(kind.get("gpuModelId"))) or None)
    return known if known and known.memory_mib else None


def _read_error(told: Json) -> tuple[str, str]:
    return told["code"], told["message"]


# the API's `VmState`
_STATES = vm.StateNames(
    starting="PENDING CLONING RECREATING STARTING",
    stopped="STOPPED SUSPENDED FAILED",
    ended="DELETING DELETED",
)
_QUIET = ("PENDING", "STARTING", "ACTIVE")


def _read(told: Json) -> vm.CloudMachine:
    status = str(told["state"])
    public, private = told.get("externalIpAddress"), told.get("internalIpAddress")
    return vm.CloudMachine(
        id=str(told["id"]),
        name=str(told["id"]),
        state=_STATES[status],
        address=private or public or None,
        ssh=vm.SshTarget(address=str(public)) if public else None,
        created_at=datetime.fromisoformat(told["createTime"]),
        reason="" if status in _QUIET else f"CUDO reports: {status}",
    )

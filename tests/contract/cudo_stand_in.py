"""A strict stand-in for CUDO Compute's API 1 over a cloud in memory: an HTTP server that refuses
requests which CUDO's own Python package (`cudo-compute` 0.3.6) and its reference
(https://www.cudocompute.com/docs/api, read in November 2026) do not allow.

Neither describes the errors for missing capacity and taken ids, or the limits of ids and scripts;
these are assumptions. Errors have the form of the package's model `Status`.
"""

import re
from typing import Any

from cavvy.providers.contract import rest_stand_in as rest
from cavvy.providers.vm.cloud import CloudFault, CloudMachine

CENTERS = ("no-luster-1", "gb-bournemouth-1")
# GPU, free GPUs, vCPUs per GPU and per GiB (least and most), USD an hour of GPU, vCPU, GiB of memory
TYPES = {
    "epyc-milan-rtx-a6000": ("RTX A6000", 4, (1, 16), (0.125, 1), ("0.45", "0.0025", "0.0036")),
    "sapphire-rapids-h100": ("H100 SXM", 8, (12, 12), (0.1, 0.1), ("2.25", "0.0035", "0.0045")),
    "cascade-lake-v100": ("V100", 4, (1, 16), (0.125, 1), ("0.39", "0.0025", "0.0036")),
    "ice-lake-a100": ("A100 PCIe", 4, (1, 16), (0.125, 1), ("1.5", "0.0025", "0.0036")),
    "next": ("Z9000", 8, (1, 16), (0.1, 1), ("9.99", "0.01", "0.01")),
    "epyc-rome": ("", 0, (0, 0), (0.25, 1), ("0", "0.0025", "0.0036")),
}
# GiB of memory; the API does not list the A100 here
MEMORY = {"RTX A6000": 48, "H100 SXM": 80, "V100": 16, "Z9000": 999}
IMAGES = (
    "debian-12",
    "ubuntu-2204-nvidia-535-docker-v20240214",
    "ubuntu-2404",
    "ubuntu-2404-nvidia-550-docker-v20250301",
)
_PROJECT = "my-project"
_FIELDS = {
    "vmId": rest.text(63, r"[a-z0-9][a-z0-9-]*"),
    "dataCenterId": rest.one_of(CENTERS),
    "machineType": rest.one_of(TYPES),
    "gpus": lambda value: type(value) is int and value >= 0,
    "vcpus": lambda value: type(value) is int and value > 0,
    "memoryGib": lambda value: type(value) is int and value > 0,
    "bootDisk": lambda value: rest.wrong_field(value, _DISK, ["sizeGib"]) is None,
    "bootDiskImageId": rest.one_of(IMAGES),
    "startScript": rest.text(65536),
    "sshKeySource": rest.one_of(
        tuple(f"SSH_KEY_SOURCE_{each}" for each in ("PROJECT", "USER", "NONE"))
    ),
    "customSshKeys": rest.list_of(rest.text(8192, r"ssh-\S+ \S+.*")),
    "metadata": lambda value: isinstance(value, dict),
    "validateOnly": rest.flag,
}
_DISK = {"sizeGib": lambda value: type(value) is int and value > 0, "id": rest.text(63)}
# the fields that the package's model `CreateVMBody` requires
_REQUIRED = ("vmId", "dataCenterId", "machineType", "gpus", "vcpus", "memoryGib", "bootDiskImageId")
_FAULTS = {"insufficient-capacity": CloudFault(400, "9", "no host available for this machine")}


class CudoStandIn(rest.RestStandIn):
    """The API in front of a cloud in memory."""

    # what the cloud sells, as its prices and types state it
    sells = """
    # type                         places                        accelerators   CPUs  memory  disk    price    spot
    1x12x120.sapphire-rapids-h100  gb-bournemouth-1,no-luster-1  1xH100/80GiB   12    120GiB  100GiB  2.8469   -
    1x8x32.cascade-lake-v100       gb-bournemouth-1,no-luster-1  1xV100/16GiB   8     32GiB   100GiB  0.5401   -
    1x8x32.epyc-milan-rtx-a6000    gb-bournemouth-1,no-luster-1  1xA6000/48GiB  8     32GiB   100GiB  0.6001   -
    2x16x64.cascade-lake-v100      gb-bournemouth-1,no-luster-1  2xV100/16GiB   16    64GiB   100GiB  1.0653   -
    2x16x64.epyc-milan-rtx-a6000   gb-bournemouth-1,no-luster-1  2xA6000/48GiB  16    64GiB   100GiB  1.1853   -
    2x24x240.sapphire-rapids-h100  gb-bournemouth-1,no-luster-1  2xH100/80GiB   24    240GiB  100GiB  5.6789   -
    4x32x128.cascade-lake-v100     gb-bournemouth-1,no-luster-1  4xV100/16GiB   32    128GiB  100GiB  2.1157   -
    4x32x128.epyc-milan-rtx-a6000  gb-bournemouth-1,no-luster-1  4xA6000/48GiB  32    128GiB  100GiB  2.3557   -
    4x48x480.sapphire-rapids-h100  gb-bournemouth-1,no-luster-1  4xH100/80GiB   48    480GiB  100GiB  11.3429  -
    8x96x960.sapphire-rapids-h100  gb-bournemouth-1,no-luster-1  8xH100/80GiB   96    960GiB  100GiB  22.6709  -
    """
    unknown = "A100 PCIe, Z9000"

    root, key = "/v1", "CUDO-TEST-KEY"
    denied = CloudFault(401, "16", "unauthenticated")
    faults = _FAULTS
    states = rest.name_states(
        starting="STARTING", running="ACTIVE", stopped="STOPPED", ended="DELETING"
    )

    def set_up(self) -> None:
        self.asked: list[dict[str, Any]] = []  # the bodies of requests for machines
        self.projects = [_PROJECT]

    def describe(self, fault: CloudFault) -> object:
        code = int(fault.code) if fault.code.isdecimal() else 2
        return {"code": code, "message": fault.message or fault.code, "details": []}

    def answer(self, request: rest.RestRequest) -> tuple[int, object]:
        match request.method, request.path.split("/")[1:]:
            case "GET", ["vms", "machine-types-2"] if not request.query:
                kinds = [_type(each, center) for each in TYPES for center in CENTERS]
                return 200, {"machineTypes": kinds}
            case "GET", ["vms", "gpu-models"] if not request.query:
                return 200, {"gpuModels": [_model(each) for each in MEMORY]}
            case "GET", ["vms", "public-images"] if not request.query:
                return 200, {"images": [{"id": each, "platform": "linux"} for each in IMAGES]}
            case "GET", ["projects"] if not request.query:
                return 200, {"projects": [{"id": each} for each in self.projects]}
            case "GET", ["projects", project, "vms"] if project == _PROJECT:
                return 200, {"VMs": [self._show(each) for each in self.machines()] + self.others}
            case "POST", ["projects", project, "vm"] if project == _PROJECT:
                return 200, self._create(request.body)
            case "GET", ["projects", project, "vms", name] if project == _PROJECT:
                return 200, {"VM": self._show(self._find(name))}
            case "POST", ["projects", project, "vms", name, "terminate"] if project == _PROJECT:
                assert request.body is None
                billed = [each.id for each in self.cloud.billed() if each.name == name]
                self.end(billed[0] if billed else "none")
                return 200, {}
        raise CloudFault(404, "5", request.path)

    def _find(self, name: str) -> CloudMachine:
        ids = [each.id for each in self.cloud.machines if each.name == name]
        return self.machine(ids[-1] if ids else "none")

    def _create(self, body: Any) -> dict[str, Any]:
        """Start a machine. Raises the fault of a request that the reference forbids."""
        if wrong := rest.wrong_field(body, _FIELDS, _REQUIRED):
            raise CloudFault(400, "3", f"invalid {wrong}")
        _, free, per_gpu, per_gib, _ = TYPES[body["machineType"]]
        gpus, vcpus, memory = body["gpus"], body["vcpus"], body["memoryGib"]
        fits = per_gpu[0] * gpus <= vcpus <= per_gpu[1] * gpus
        if gpus > free or not fits or not per_gib[0] * memory <= vcpus <= per_gib[1] * memory:
            raise CloudFault(400, "3", "invalid size")
        if body["vmId"] in [each.name for each in self.cloud.billed()]:
            raise CloudFault(409, "6", "the id is taken")
        self.start(body["vmId"], body["startScript"])
        self.asked.append(body)
        return {"id": body["vmId"], "vm": {"id": body["vmId"], "state": "PENDING"}}

    def _show(self, machine: CloudMachine) -> dict[str, Any]:
        assert machine.created_at is not None
        return {
            "id": machine.id if not machine.name else machine.name,
            "datacenterId": CENTERS[0],
            "machineType": "epyc-milan-rtx-a6000",
            "externalIpAddress": "192.0.2.4" if machine.address else "",
            "internalIpAddress": machine.address or "",
            "memory": 32,
            "vcpus": 8,
            "gpuModel": "RTX A6000",
            "gpuQuantity": 1,
            "shortState": "runn",
            "state": self.states[machine.state],
            "createTime": machine.created_at.strftime("%Y-%m-%dT%H:%M:%S.000Z"),
            "metadata": {},
        }


def _id(gpu: str) -> str:
    return re.sub(r"\W", "-", gpu).lower()


def _model(gpu: str) -> dict[str, Any]:
    """A GPU, as the package's model `GpuModel` has it."""
    return {
        "id": _id(gpu),
        "vendorName": "nvidia",
        "modelName": gpu,
        "memoryGib": MEMORY[gpu],
    }


def _type(name: str, center: str) -> dict[str, Any]:
    gpu, free, per_gpu, per_gib, (gpu_usd, vcpu_usd, memory_usd) = TYPES[name]
    prices = {"gpu": gpu_usd, "vcpu": vcpu_usd, "memoryGib": memory_usd}
    prices |= {"minStorageGib": "0.0001", "ipv4": "0.0049"}
    free_parts = {"Vcpu": 128, "MemoryGib": 1024, "Gpu": free, "StorageGib": 4000}
    return {
        "dataCenterId": center,
        "machineType": name,
        "cpuModel": "a CPU",
        "gpuModel": gpu,
        "gpuModelId": _id(gpu),
        "minVcpuPerGpu": per_gpu[0],
        "maxVcpuPerGpu": per_gpu[1],
        "minVcpuPerMemoryGib": per_gib[0],
        "maxVcpuPerMemoryGib": per_gib[1],
        "renewableEnergy": True,
        "minVcpu": 1,
        "minMemoryGib": 1,
        **{f"{part}PriceHr": {"value": usd} for part, usd in prices.items()},
        **{f"max{part}Free": number for part, number in free_parts.items()},
        **{f"total{part}Free": number for part, number in free_parts.items()},
    }

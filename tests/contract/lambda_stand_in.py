"""A strict stand-in for Lambda's Cloud API 1.10 over a cloud in memory: an HTTP server that refuses
requests which the published description (https://docs.lambda.ai/api/cloud) does not allow.

It does not enforce the general limit of one request per second, since its clock stands still.
"""

import asyncio
import re
from typing import Any

from tests.contract.rest_stand_in import RestStandIn, must_exist
from tests.contract.vm_cloud import MemoryCloud

from cavvy.domain.offers import Offer
from cavvy.domain.units import HourlyRate
from cavvy.providers.vm.cloud import CloudFault, CloudMachine, MachineRequest, MachineState

TYPES = {  # name: description of the GPU, cents an hour, vCPUs, GiB of memory and of disk, GPUs
    "cpu_4x_general": ("N/A", 20, 4, 16, 512, 0),
    "gpu_1x_a10": ("A10 (24 GB PCIe)", 129, 30, 200, 1400, 1),
    "gpu_8x_a100": ("A100 (40 GB SXM4)", 1592, 124, 1800, 6144, 8),
    "gpu_8x_a100_80gb_sxm4": ("A100 (80 GB SXM4)", 2232, 240, 1800, 19456, 8),
    "gpu_1x_h100_pcie": ("H100 (80 GB PCIe)", 329, 26, 200, 1024, 1),
    "gpu_8x_h100_sxm5": ("H100 (80 GB SXM5)", 3192, 208, 1800, 22528, 8),
    "gpu_1x_gh200": ("GH200 (96 GB)", 229, 64, 432, 4096, 1),
    "gpu_1x_next": ("Z9000 (999 GB SXM9)", 9999, 64, 432, 4096, 1),
}
REGIONS = ("us-west-1", "us-east-1")
_LAUNCH = {
    "region_name", "instance_type_name", "ssh_key_names", "file_system_names", "file_system_mounts",
    "hostname", "name", "image", "user_data", "tags", "firewall_rulesets",
}  # fmt: skip
_CODES = {
    "insufficient-capacity": "instance-operations/launch/insufficient-capacity",
    "forbidden": "global/account-inactive",
    "not-found": "global/object-does-not-exist",
}
_STATES = {
    MachineState.STARTING: "booting",
    MachineState.RUNNING: "active",
    MachineState.STOPPED: "unhealthy",
    MachineState.ENDED: "terminated",
}


class LambdaStandIn(RestStandIn):
    """The API in front of a cloud in memory."""

    key = "secret_lambda_1.test"
    denied = CloudFault(401, "global/invalid-api-key", "API key was invalid.")

    def __init__(self, cloud: MemoryCloud) -> None:
        super().__init__(cloud, "/api/v1")
        self.keys = ["laptop"]
        self.quota = 1000
        self.others: list[dict[str, Any]] = []  # instances that Cavvy did not make

    def describe(self, fault: CloudFault) -> object:
        return {"error": {"code": _CODES.get(fault.code, fault.code), "message": fault.message}}

    def answer(self, method: str, path: str, body: Any) -> tuple[int, object]:
        return 200, {"data": self._answer(method, path, body)}

    def _answer(self, method: str, path: str, body: Any) -> Any:
        match method, path:
            case "GET", "/instance-types":
                return {name: self._type(name) for name in TYPES}
            case "GET", "/ssh-keys":
                return [
                    {"id": name, "name": name, "public_key": "ssh-ed25519 A"} for name in self.keys
                ]
            case "GET", "/instances":
                return [self._show(each) for each in asyncio.run(self.cloud.list())] + self.others
            case "GET", _ if path.startswith("/instances/"):
                found = asyncio.run(self.cloud.get(path.rpartition("/")[2]))
                return self._show(must_exist(found))
            case "POST", "/instance-operations/launch":
                return {"instance_ids": self._launch(body)}
            case "POST", "/instance-operations/terminate":
                return {"terminated_instances": [self._end(each) for each in _ids(body)]}
        raise CloudFault(404, "global/not-found", path)

    def _type(self, name: str) -> dict[str, Any]:
        gpu, cents, vcpus, memory, disk, gpus = TYPES[name]
        specs = {"vcpus": vcpus, "memory_gib": memory, "storage_gib": disk, "gpus": gpus}
        kind = {
            "name": name,
            "description": f"{gpus}x {gpu}",
            "gpu_description": gpu,
            "price_cents_per_hour": cents,
            "specs": specs,
        }
        regions = [{"name": each, "description": "somewhere"} for each in REGIONS]
        return {"instance_type": kind, "regions_with_capacity_available": regions}

    def _launch(self, body: Any) -> list[str]:
        self._check(body)
        if len(self.cloud.billed()) >= self.quota:
            raise CloudFault(400, "global/quota-exceeded", "Quota exceeded.")
        offer = Offer(
            provider="lambda",
            region="here",
            instance_type="small",
            rate=HourlyRate(0),
        )
        request = MachineRequest(
            gang=None,  # type: ignore[arg-type]  # the cloud in memory does not read it
            offer=offer,
            names=[body.get("name", "")],
            user_data=[body.get("user_data", "")],
            tags={each["key"]: each["value"] for each in body.get("tags", ())},
        )
        return list(asyncio.run(self.cloud.create(request)))

    def _check(self, body: Any) -> None:
        """Raise the fault of a request that the description does not allow."""
        wrong = None
        tags = body.get("tags", [])
        if set(body) - _LAUNCH:
            wrong = f"unknown: {sorted(set(body) - _LAUNCH)}"
        elif body.get("instance_type_name") not in TYPES:
            wrong = "instance_type_name"
        elif body.get("region_name") not in REGIONS:
            wrong = "region_name"
        elif len(body.get("ssh_key_names", ())) != 1 or body["ssh_key_names"][0] not in self.keys:
            wrong = "ssh_key_names: exactly one of the account's keys"
        elif not isinstance(body.get("name", ""), str) or len(body.get("name", "")) > 64:
            wrong = "name"
        elif len(body.get("user_data", "").encode()) > 1_000_000:
            wrong = "user_data"
        elif not all(
            set(each) == {"key", "value"}
            and re.fullmatch(r"[a-z][a-z0-9-:]{1,54}", each["key"])
            and len(each["value"]) <= 128
            for each in tags
        ):
            wrong = "tags"
        if wrong is not None:
            raise CloudFault(400, "global/invalid-parameters", wrong)

    def _end(self, machine: str) -> dict[str, Any]:
        asyncio.run(self.cloud.delete(machine))
        return {"id": machine, "status": "terminating"}

    def _show(self, machine: CloudMachine) -> dict[str, Any]:
        told: dict[str, Any] = {
            "id": machine.id,
            "name": machine.name,
            "status": _STATES[machine.state],
            "ssh_key_names": ["laptop"],
            "file_system_names": [],
            "region": {"name": REGIONS[0], "description": "somewhere"},
            "instance_type": self._type("cpu_4x_general")["instance_type"],
            "tags": [{"key": key, "value": value} for key, value in machine.tags.items()],
        }
        if machine.address:
            told |= {"ip": "198.51.100.2", "private_ip": machine.address}
        return told


def _ids(body: Any) -> list[str]:
    ids = body.get("instance_ids")
    if set(body) != {"instance_ids"} or not isinstance(ids, list) or not ids:
        raise CloudFault(400, "global/invalid-parameters", "instance_ids")
    return ids

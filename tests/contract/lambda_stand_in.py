"""A strict stand-in for Lambda's Cloud API 1.10 over a cloud in memory: an HTTP server that refuses
requests which the published description (https://docs.lambda.ai/api/cloud) does not allow.

It does not enforce the general limit of one request per second, since its clock stands still.
"""

from datetime import timedelta
from types import MappingProxyType
from typing import Any

from cavvy.providers.contract.rest_stand_in import (
    RestRequest,
    RestStandIn,
    list_of,
    name_states,
    text,
    wrong_field,
)
from cavvy.providers.vm.cloud import CloudFault, CloudMachine

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
_PARAMETERS = "global/invalid-parameters"
_FAULTS = {
    "insufficient-capacity": CloudFault(
        400, "instance-operations/launch/insufficient-capacity", "Not enough capacity."
    ),
    "quota-exceeded": CloudFault(400, "global/quota-exceeded", "Quota exceeded."),
    "forbidden": CloudFault(403, "global/account-inactive", "Your account is inactive."),
    "not-found": CloudFault(404, "global/object-does-not-exist", "It does not exist."),
}


class LambdaStandIn(RestStandIn):
    """The API in front of a cloud in memory."""

    # what the cloud sells, as its prices and types state it
    sells = """
    # type                 places               accelerators       CPUs  memory   disk      price  spot
    cpu_4x_general         us-east-1,us-west-1  -                  4     16GiB    512GiB    0.2    -
    gpu_1x_a10             us-east-1,us-west-1  1xA10/24GiB        30    200GiB   1400GiB   1.29   -
    gpu_1x_gh200           us-east-1,us-west-1  1xGH200/96GiB      64    432GiB   4096GiB   2.29   -
    gpu_1x_h100_pcie       us-east-1,us-west-1  1xH100-PCIe/80GiB  26    200GiB   1024GiB   3.29   -
    gpu_8x_a100            us-east-1,us-west-1  8xA100/40GiB       124   1800GiB  6144GiB   15.92  -
    gpu_8x_a100_80gb_sxm4  us-east-1,us-west-1  8xA100/80GiB       240   1800GiB  19456GiB  22.32  -
    gpu_8x_h100_sxm5       us-east-1,us-west-1  8xH100/80GiB       208   1800GiB  22528GiB  31.92  -
    """
    unknown = "Z9000 (999 GB SXM9)"
    arm = ("gpu_1x_gh200",)
    minimum_charges = MappingProxyType({"": timedelta(minutes=1)})

    root, key = "/api/v1", "secret_lambda_1.test"
    key_file = "api_key = {key}\n"
    denied = CloudFault(401, "global/invalid-api-key", "API key was invalid.")
    faults = _FAULTS
    states = name_states(
        starting="booting", running="active", stopped="unhealthy", ended="terminated"
    )
    keys = ("laptop",)

    def describe(self, fault: CloudFault) -> object:
        return {"error": {"code": fault.code, "message": fault.message}}

    def answer(self, request: RestRequest) -> tuple[int, object]:
        return 200, {"data": self._answer(request)}

    def _answer(self, request: RestRequest) -> Any:
        match request.method, request.path:
            case "GET", "/instance-types":
                return {name: _type(name) for name in TYPES}
            case "GET", "/ssh-keys":
                return [
                    {"id": name, "name": name, "public_key": "ssh-ed25519 A"} for name in self.keys
                ]
            case "GET", "/instances":
                return [self._show(each) for each in self.machines()] + self.others
            case "GET", path if path.startswith("/instances/"):
                return self._show(self.machine(path.rpartition("/")[2]))
            case "POST", "/instance-operations/launch":
                return {"instance_ids": [self._launch(request.body)]}
            case "POST", "/instance-operations/terminate":
                wrong = wrong_field(
                    request.body, {"instance_ids": list_of(text(64))}, ["instance_ids"]
                )
                if wrong or not request.body["instance_ids"]:
                    raise CloudFault(400, _PARAMETERS, "instance_ids")
                return {"terminated_instances": list(map(self._end, request.body["instance_ids"]))}
        raise CloudFault(404, "global/not-found", request.path)

    def _launch(self, body: Any) -> str:
        """Start an instance. Raises the fault of a request that the description does not allow."""
        fields = {
            "region_name": lambda value: value in REGIONS,
            "instance_type_name": lambda value: value in TYPES,
            "ssh_key_names": lambda value: len(value) == 1 and value[0] in self.keys,
            "file_system_names": list_of(text(64)),
            "hostname": text(63),
            "name": text(64),
            "image": lambda value: set(value) in ({"id"}, {"family"}),
            "user_data": text(1_000_000),
            "tags": list_of(_is_tag),
        }
        required = ("region_name", "instance_type_name", "ssh_key_names")
        if wrong := wrong_field(body, fields, required):
            raise CloudFault(400, _PARAMETERS, wrong)
        tags = {each["key"]: each["value"] for each in body.get("tags", ())}
        return self.start(body.get("name", ""), body.get("user_data", ""), tags)

    def _end(self, machine: str) -> dict[str, Any]:
        self.end(machine)
        return {"id": machine, "status": "terminating"}

    def _show(self, machine: CloudMachine) -> dict[str, Any]:
        told: dict[str, Any] = {
            "id": machine.id,
            "name": machine.name,
            "status": self.states[machine.state],
            "ssh_key_names": ["laptop"],
            "file_system_names": [],
            "region": {"name": REGIONS[0], "description": "somewhere"},
            "instance_type": _type("cpu_4x_general")["instance_type"],
            "tags": [{"key": key, "value": value} for key, value in machine.tags.items()],
        }
        if machine.address:
            told |= {"ip": "198.51.100.2", "private_ip": machine.address}
        return told


def _is_tag(tag: Any) -> bool:
    fields = {"key": text(55, r"[a-z][a-z0-9-:]{1,54}"), "value": text(128)}
    return wrong_field(tag, fields, fields) is None


def _type(name: str) -> dict[str, Any]:
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

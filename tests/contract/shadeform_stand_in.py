"""A strict stand-in for Shadeform's API 1 over a cloud in memory: an HTTP server that refuses
requests which the documentation (https://docs.shadeform.ai/api-reference and
https://docs.shadeform.ai/guides/spotinstances, read in November 2026) does not allow.

The documentation does not contain the form of errors; their texts here are invented. The limits of
names and scripts are assumptions too.
"""

import base64
from typing import Any

from cavvy.providers.contract.rest_stand_in import (
    RestRequest,
    RestStandIn,
    flag,
    list_of,
    name_states,
    one_of,
    text,
    wrong_field,
)
from cavvy.providers.vm.cloud import CloudFault, CloudMachine

REGIONS = ("us-central-1", "canada-1")
# cloud, type: cents an hour, GPU, GPUs, GB of a GPU, vCPUs, GB of memory, GB of disk, deployment
TYPES = {
    ("massedcompute", "A6000_plus"): (57, "A6000", 1, 48, 12, 64, 256, "vm"),
    ("hyperstack", "A100_80Gx8"): (1080, "A100_80G", 8, 80, 252, 1920, 850, "vm"),
    ("lambdalabs", "GH200"): (149, "GH200", 1, 96, 64, 432, 4096, "baremetal"),
    ("runpod", "L40S"): (79, "L40S", 1, 48, 16, 94, 100, "container"),
    ("latitude", "Z9000"): (999, "Z9000", 1, 999, 16, 180, 480, "vm"),
}
SPOT = {("massedcompute", "A6000_plus"): "0.30"}  # USD an hour, in the first region
OPTIONS = ("ubuntu22.04_cuda12.2_shade_os", "ubuntu20.04_cuda12.0_shade_os")
_LAUNCH = {
    "type": one_of(("script",)),
    "script_configuration": lambda value: (
        wrong_field(value, _SCRIPT, _SCRIPT) is None
        and base64.b64decode(value["base64_script"], validate=True).startswith(b"#!")
    ),
}
_SCRIPT = {"base64_script": text(100_000, r"[A-Za-z0-9+/]+={0,2}")}
_FIELDS = {
    "cloud": one_of({cloud for cloud, _ in TYPES}),
    "region": one_of(REGIONS),
    "shade_instance_type": one_of({kind for _, kind in TYPES}),
    "shade_cloud": flag,
    "name": text(60),
    "os": one_of(OPTIONS),
    "launch_configuration": lambda value: wrong_field(value, _LAUNCH, _LAUNCH) is None,
    "ssh_key_id": text(36),
    "volume_ids": list_of(text(36)),
    "tags": list_of(text(255)),
    "rental_type": one_of(("on_demand", "spot")),
}
_REQUIRED = ("cloud", "region", "shade_instance_type", "shade_cloud", "name")

_FAULTS = {"insufficient-capacity": CloudFault(409, "conflict", "The instance is out of capacity.")}


class ShadeformStandIn(RestStandIn):
    """The API in front of a cloud in memory."""

    # what the cloud sells, as its prices and types state it
    sells = """
    # type                    places        accelerators   CPUs  memory   disk     price  spot
    massedcompute.A6000_plus  canada-1      1xA6000/48GiB  12    64GiB    256GiB   0.57   -
    hyperstack.A100_80Gx8     us-central-1  8xA100/80GiB   252   1920GiB  850GiB   10.8   -
    lambdalabs.GH200          us-central-1  1xGH200/96GiB  64    432GiB   4096GiB  1.49   -
    massedcompute.A6000_plus  us-central-1  1xA6000/48GiB  12    64GiB    256GiB   0.57   0.3
    """
    unknown = "Z9000"
    arm = ("lambdalabs.GH200",)

    root, key = "/v1", "SHADEFORM-TEST-KEY"
    denied = CloudFault(401, "unauthorized", "The API key is invalid.")
    faults = _FAULTS
    states = name_states(starting="pending", running="active", stopped="error", ended="deleting")

    def set_up(self) -> None:
        self.asked: list[dict[str, Any]] = []  # the bodies of requests for instances
        self.preempted: set[str] = set()

    def describe(self, fault: CloudFault) -> object:
        return {"code": fault.code, "message": fault.message}

    def authorize(self, request: RestRequest) -> None:
        if request.headers.get("x-api-key") != self.key or "authorization" in request.headers:
            raise self.denied

    def answer(self, request: RestRequest) -> tuple[int, object]:
        match request.method, request.path.split("/")[1:]:
            case "GET", ["instances", "types"] if request.query == {"available": "true"}:
                return 200, {"instance_types": [_type(*each) for each in TYPES]}
            case "GET", ["instances"] if not request.query:
                shown = [self._show(each) for each in self.machines()]
                return 200, {"instances": shown + self.others}
            case "POST", ["instances", "create"]:
                return 200, self._create(request.body)
            case "GET", ["instances", machine, "info"]:
                return 200, self._show(self.machine(machine))
            case "POST", ["instances", machine, "delete"] if request.body is None:
                self.end(machine)
                return 200, None
        raise CloudFault(404, "not_found", request.path)

    def _create(self, body: Any) -> dict[str, Any]:
        """Start an instance. Raises the fault of a request that the documentation forbids."""
        if wrong := wrong_field(body, _FIELDS, _REQUIRED):
            raise CloudFault(400, "bad_request", f"{wrong} is invalid")
        kind = body["cloud"], body["shade_instance_type"]
        if kind not in TYPES:
            raise CloudFault(400, "bad_request", "shade_instance_type is invalid")
        if body.get("rental_type") == "spot":
            if kind not in SPOT or body["region"] != REGIONS[0]:
                raise CloudFault(400, "bad_request", "no spot instances of this type here")
            assert body["shade_cloud"]
        script = base64.b64decode(
            body["launch_configuration"]["script_configuration"]["base64_script"]
        )
        new = self.start(body["name"], script.decode())
        self.asked.append(body)
        return {"id": new, "cloud_assigned_id": "b8266296-9dc8-4399-9a66-cc3422de0331"}

    def _show(self, machine: CloudMachine) -> dict[str, Any]:
        assert machine.created_at is not None
        return {
            "id": machine.id,
            "cloud": "massedcompute",
            "region": REGIONS[0],
            "shade_instance_type": "A6000_plus",
            "cloud_instance_type": "gpu_1x_A6000_high_perf",
            "cloud_assigned_id": "eca4defe-32f3-4f96-ab23-dc67220c8510",
            "shade_cloud": True,
            "name": machine.name,
            "configuration": _configuration("massedcompute", "A6000_plus"),
            "ip": machine.address,
            "ssh_user": "shadeform",
            "ssh_port": 22 if machine.address else None,
            "status": self.states[machine.state],
            "status_details": "preempted" if machine.id in self.preempted else "",
            "cost_estimate": "0.0006106021",
            "hourly_price": 57,
            "created_at": machine.created_at.strftime("%Y-%m-%dT%H:%M:%S.000Z"),
            "deleted_at": machine.ended_at and machine.ended_at.strftime("%Y-%m-%dT%H:%M:%S.000Z"),
        }


def _configuration(cloud: str, kind: str) -> dict[str, Any]:
    _, gpu, gpus, vram, vcpus, memory, disk, _ = TYPES[cloud, kind]
    return {
        "memory_in_gb": memory,
        "storage_in_gb": disk,
        "vcpus": vcpus,
        "num_gpus": gpus,
        "gpu_type": gpu,
        "interconnect": "pcie",
        "os_options": list(OPTIONS),
        "vram_per_gpu_in_gb": vram,
    }


def _type(cloud: str, kind: str) -> dict[str, Any]:
    places: list[dict[str, Any]] = [
        {"region": each, "available": each == REGIONS[0] or kind == "A6000_plus"}
        | {"display_name": "somewhere", "rental_type": "on_demand"}
        for each in REGIONS
    ]
    if (cloud, kind) in SPOT:
        price = {"rental_type": "spot", "hourly_price": SPOT[cloud, kind]}
        places.append({"region": REGIONS[0], "available": True, "display_name": "here"} | price)
    return {
        "cloud": cloud,
        "shade_instance_type": kind,
        "cloud_instance_type": f"native-{kind}",
        "configuration": _configuration(cloud, kind),
        "hourly_price": TYPES[cloud, kind][0],
        "deployment_type": TYPES[cloud, kind][-1],
        "availability": places,
        "boot_time": {"min_boot_in_sec": 180, "max_boot_in_sec": 300},
    }

"""A strict stand-in for Crusoe Cloud's API v1alpha5 over a cloud in memory: an HTTP server that
checks the signature of each request and refuses requests which the published description
(https://docs.crusoecloud.com/api, read in November 2026) does not allow, and returns lists in
pages.

The description does not list the codes of errors; "out_of_stock" is what users report.
"""

import base64
import hashlib
import hmac
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

from cavvy.providers.contract.rest_stand_in import (
    RestRequest,
    RestStandIn,
    list_of,
    name_states,
    one_of,
    text,
    wrong_field,
)
from cavvy.providers.vm.cloud import CloudFault, CloudMachine

# GPU, GPUs, CPU cores, GB of memory, GB of ephemeral disk, free machines in the first location
TYPES = {
    "l40s-48gb.1x": ("L40S", 1, 8, 147, 0, 16),
    "a100-80gb-sxm-ib.8x": ("A100", 8, 96, 960, 7600, 4),
    "h100-80gb-sxm-ib.8x": ("H100", 8, 176, 960, 7600, 0),
    "a40.1x": ("A40", 1, 6, 60, 0, 3),
    "next-999gb.1x": ("Z9000", 1, 6, 60, 0, 3),
    "c1a.2x": ("", 0, 2, 8, 0, 50),
}
IMAGES = (
    "ubuntu20.04-nvidia-pcie-docker",
    "ubuntu22.04-nvidia-pcie-docker",
    "ubuntu22.04-nvidia-sxm-docker",
    "rocky9",
)
LOCATION = "us-northcentral1-a"
_PROJECT = "09ae8411-0fbb-411c-898c-2b8f19622ae1"
_INSTANCES = ("compute", "vms", "instances")
_FIELDS = {
    "name": text(63, r"[a-z0-9][a-z0-9-]*"),
    "type": one_of(TYPES),
    "location": one_of((LOCATION, "us-east1-a")),
    "image": one_of([f"{each}:latest" for each in IMAGES]),
    "ssh_public_key": text(8192, r"ssh-\S+ \S+.*"),
    # https://docs.crusoecloud.com/compute/virtual-machines/managing-lifecycle-scripts
    "startup_script": text(64_000, r"#!/bin/bash\n[\x00-\x7f]*"),
    "shutdown_script": text(64_000, r"#!/bin/bash\n[\x00-\x7f]*"),
    "disks": list_of(lambda value: isinstance(value, dict)),
    "network_interfaces": list_of(lambda value: isinstance(value, dict)),
    "host_channel_adapters": list_of(lambda value: isinstance(value, dict)),
}
_FAULTS = {"insufficient-capacity": CloudFault(400, "out_of_stock", "no VM of this type is left")}
_SETTINGS = {"prices": "L40S=1.5, A100=1.95 H100=3.9", "ssh_key": "ssh-ed25519 AAAA me"}


class CrusoeStandIn(RestStandIn):
    """The API in front of a cloud in memory."""

    # what the cloud sells, as its prices and types state it
    sells = """
    # type               places              accelerators  CPUs  memory  disk     price  spot
    a100-80gb-sxm-ib.8x  us-northcentral1-a  8xA100/80GiB  96    960GiB  7600GiB  15.6   -
    l40s-48gb.1x         us-northcentral1-a  1xL40S/48GiB  8     147GiB  -        1.5    -
    """

    root = "/v1alpha5"
    key = "HrbZ3VTUb2YNAq53Md1EsA"  # the examples of the description
    key_id = "R7p5XctCQMuGlpVBmVdqzA"
    key_file = f'[default]\naccess_key_id="{key_id}"\nsecret_key="{{key}}"\n'
    settings = _SETTINGS
    denied = CloudFault(401, "unauthorized", "bad credentials")
    faults = _FAULTS
    states = name_states(
        starting="STATE_INITIALIZING",
        running="STATE_RUNNING",
        stopped="STATE_SHUTOFF",
        ended="STATE_DELETING",
    )

    def set_up(self) -> None:
        self.asked: list[dict[str, Any]] = []  # the bodies of requests for machines
        self.failed: dict[str, str] = {}  # codes of creations that failed, by machine
        self.pending: set[str] = set()  # machines whose creation has not ended yet
        self.projects = [_PROJECT]

    def machines(self) -> Sequence[CloudMachine]:
        return [each for each in super().machines() if each.id not in self.pending]

    def machine(self, machine: str) -> CloudMachine:
        if machine in self.pending:
            raise CloudFault(404, "not_found", "no such instance")
        return super().machine(machine)

    def describe(self, fault: CloudFault) -> object:
        return {"code": fault.code, "message": fault.message or fault.code}

    def authorize(self, request: RestRequest) -> None:
        """Check the signature, as https://docs.crusoecloud.com/reference/api describes."""
        at = request.headers.get("x-crusoe-timestamp", "")
        parts = urlsplit(request.target)
        query = "&".join(sorted(parts.query.split("&")))
        payload = f"{parts.path}\n{query}\n{request.method}\n{at}\n"
        secret = base64.urlsafe_b64decode(f"{self.key}==")
        digest = hmac.new(secret, payload.encode("ascii"), hashlib.sha256).digest()
        signature = base64.urlsafe_b64encode(digest).decode().rstrip("=")
        if request.headers.get("authorization") != f"Bearer 1.0:{self.key_id}:{signature}":
            raise self.denied
        if abs(datetime.fromisoformat(at) - self.cloud.time) > timedelta(minutes=1):
            raise self.denied

    def answer(self, request: RestRequest) -> tuple[int, object]:
        match request.method, request.path.split("/")[1:]:
            case "GET", ["organizations", "projects"]:
                return 200, {"items": [{"id": each, "name": each} for each in self.projects]}
            case "GET", ["capacities"]:
                return 200, {"items": self._list_free()}
            case "GET", ["compute", "images"]:
                return 200, {"items": [{"id": each, "name": each} for each in IMAGES]}
            case method, ["projects", project, *path] if project == _PROJECT:
                return self._answer_for_project(method, tuple(path), request)
        raise CloudFault(404, "not_found", request.path)

    def _answer_for_project(
        self, method: str, path: tuple[str, ...], request: RestRequest
    ) -> tuple[int, object]:
        if (method, path) == ("GET", ("compute", "vms", "types")):
            return 200, {"items": [_type(each) for each in TYPES]}
        if (method, path) == ("GET", _INSTANCES):
            return 200, self._page(request)
        if (method, path) == ("POST", _INSTANCES):
            return 200, {"operation": self._create(request.body)}
        if path[:-1] == (*_INSTANCES, "operations") and method == "GET":
            return 200, self._show_operation(path[-1].removeprefix("of-"))
        if path == (*_INSTANCES, "operations") and method == "GET":
            # operations that go on, and those that have ended and were not queried yet
            machine = request.query["resource_id"]
            shown = machine in self.pending or machine in self.failed
            return 200, {"items": [self._show_operation(machine)] if shown else []}
        if path[:-1] == _INSTANCES and method == "GET":
            return 200, self._show(self.machine(path[-1]))
        if path[:-1] == _INSTANCES and method == "DELETE":
            self.end(path[-1])
            return 200, {"operation": _operation(path[-1], "IN_PROGRESS")}
        raise CloudFault(404, "not_found", request.path)

    def _show_operation(self, machine: str) -> dict[str, Any]:
        """The creation of a machine."""
        ended = "FAILED" if machine in self.failed else "SUCCEEDED"
        result = {"code": self.failed.get(machine), "message": "it failed"}
        state = "IN_PROGRESS" if machine in self.pending else ended
        return _operation(machine, state) | {"result": result}

    def _page(self, request: RestRequest) -> dict[str, Any]:
        """A page; the token of the next page is its number."""
        shown = [self._show(each) for each in self.machines()] + self.others
        number = int(request.query.get("next_token", "1"))
        items, more = self.cut(shown, number, int(request.query.get("limit", 20)))
        return {"items": list(items), "next_page_token": str(number + 1) if more else ""}

    def _list_free(self) -> list[dict[str, Any]]:
        taken = len(self.cloud.billed())
        return [
            {"location": LOCATION, "type": name, "quantity": max(0, values[-1] - taken)}
            for name, values in TYPES.items()
        ]

    def _create(self, body: Any) -> dict[str, Any]:
        """Start a machine. Raises the fault of a request that the description does not allow."""
        if wrong := wrong_field(body, _FIELDS, ("type", "ssh_public_key", "name")):
            raise CloudFault(400, "bad_request", f"invalid {wrong}")
        script = body["startup_script"].removeprefix("#!/bin/bash\n")
        new = self.start(body["name"], f"#!/bin/sh\n{script}")
        self.asked.append(body)
        return _operation(new, "IN_PROGRESS")

    def _show(self, machine: CloudMachine) -> dict[str, Any]:
        assert machine.created_at is not None
        ips = {
            "private_ipv4": {"address": machine.address or ""},
            "public_ipv4": {
                "address": "198.51.100.7" if machine.address else "",
                "id": "ip-1",
                "type": "dynamic",
            },
        }
        return {
            "id": machine.id,
            "project_id": _PROJECT,
            "name": machine.name,
            "type": "l40s-48gb.1x",
            "location": LOCATION,
            "state": self.states[machine.state],
            "created_at": machine.created_at.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "network_interfaces": [{"id": "nic-1", "ips": [ips]}],
            "disks": [],
        }


def _operation(machine: str, state: str) -> dict[str, Any]:
    return {
        "operation_id": f"of-{machine}",
        "state": state,
        "metadata": {"id": machine},
        "started_at": "2030-01-01T00:00:00Z",
        "completed_at": "",
    }


def _type(name: str) -> dict[str, Any]:
    gpu, gpus, cores, memory, disk, _ = TYPES[name]
    return {
        "product_name": name,
        "description": f"{gpus}x {gpu}",
        "cpu_cores": cores,
        "cpu_type": "amd",
        "memory_gb": memory,
        "memory_type": "RAM",
        "disk_gb": disk,
        "disk_type": "NVMe",
        "num_gpu": gpus,
        "gpu_type": gpu,
    }

"""A strict stand-in for instances of Vertex AI Workbench over a cloud in memory: an HTTP server that
checks each request and each of its own replies against Google's discovery document of the Notebooks
API, version 2. Instances are created and deleted by operations.
"""

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from tests.contract.gcp_stand_in import PROJECT, GoogleStandIn
from tests.contract.google_description import describe_api
from tests.contract.vertex_stand_in import MACHINE_TYPES

from cavvy.domain.tasks import Scalar
from cavvy.providers.contract.rest_stand_in import RestRequest, name_states
from cavvy.providers.vm.cloud import CloudFault, CloudMachine, MachineState

ZONES = ("us-central1-a", "us-central1-b", "europe-west4-a")
LOADER = "gs://bucket/cavvy.sh"
FULL = "The zone 'us-central1-a' does not have enough resources available to fulfill the request."
_ID = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
_LABEL = re.compile(r"[a-z0-9_-]{0,63}")
_WITH_GPU = re.compile(r"(a2|a3|a4|g2|g4)-")


class WorkbenchStandIn(GoogleStandIn):
    """The API, and Google's token service, in front of a cloud in memory."""

    # what the cloud sells, as its prices and types state it
    sells = """
    # type              places                                               accelerators  CPUs  memory  disk  price     spot
    e2-standard-4       europe-west4/europe-west4-a                          -             4     16GiB   -     0.187544  -
    n1-standard-8-t4x1  europe-west4/europe-west4-a                          1xT4/16GiB    8     30GiB   -     1.365836  -
    e2-standard-4       us-central1/us-central1-a,us-central1/us-central1-b  -             4     16GiB   -     0.174023  -
    n1-standard-8-t4x1  us-central1/us-central1-a,us-central1/us-central1-b  1xT4/16GiB    8     30GiB   -     1.309998  -
    """

    root = "/v2"
    settings: Mapping[str, Scalar] = {
        "zones": ", ".join(ZONES),
        "script": LOADER,
        "fees": "vCPU=0.01, T4=0.5",
    }
    faults: Mapping[str, CloudFault] = {
        "not-found": CloudFault(404, "NOT_FOUND", "Resource was not found"),
        "too-many-requests": CloudFault(429, "RESOURCE_EXHAUSTED", "Quota exceeded for requests"),
        "internal-error": CloudFault(500, "INTERNAL", "Internal error encountered"),
        "unavailable": CloudFault(503, "UNAVAILABLE", "The service is unavailable"),
        "forbidden": CloudFault(403, "PERMISSION_DENIED", "Permission denied"),
        "insufficient-capacity": CloudFault(400, "FAILED_PRECONDITION", FULL),
        "quota-exceeded": CloudFault(
            429, "RESOURCE_EXHAUSTED", "Quota 'NVIDIA_T4_GPUS' exceeded.  Limit: 0.0 globally."
        ),
    }
    states = name_states(starting="PROVISIONING", running="ACTIVE", stopped="STOPPED")

    def set_up(self) -> None:
        self.api = describe_api("notebooks.v2")
        self.bodies: dict[str, dict[str, Any]] = {}  # of requests, by name
        self.errors: dict[str, str] = {}  # of creations, by name
        self.keeps: set[str] = set()  # instances whose deletion goes on for some time
        self.calls: list[str] = []
        self._zones: dict[str, str] = {}  # by machine

    def answer(self, request: RestRequest) -> tuple[int, object]:
        query, body = dict(request.query), request.body
        name, given = self.api.read_request(request.method, f"/v2{request.path}", query, body)
        method = name.removeprefix("notebooks.projects.locations.")
        self.calls.append(f"notebooks.{method}")
        zone = given["locationsId"]
        if given["projectsId"] != PROJECT:
            raise CloudFault(403, "PERMISSION_DENIED", "Permission denied on the project")
        if zone not in ZONES:
            raise CloudFault(404, "NOT_FOUND", f"Location {zone} is not found")
        match method:
            case "instances.create":
                self._create(zone, query["instanceId"], body)
                return self._checked("Operation", self._operation(zone, query["instanceId"]))
            case "instances.get":
                return self._checked("Instance", self._show(self._find(zone, given)))
            case "instances.list":
                told = self._list(zone, query)
                status, _ = self._checked("ListInstancesResponse", told)
                return status, {**told, "instances": [*told["instances"], *self.others]}
            case "instances.delete":
                self._delete(self._find(zone, given, shown=False))
                return self._checked("Operation", self._operation(zone, "delete"))
            case "operations.get":
                return self._checked("Operation", self._operation(zone, given["operationsId"]))
        raise CloudFault(501, "UNIMPLEMENTED", method)

    def start_notebook(self, name: str, body: dict[str, Any]) -> str:
        """Start the machine of an instance; returns its id. Raises CloudFault."""
        return self.start(name, self.script_of(name), body["labels"])

    def script_of(self, name: str) -> str:
        """The script in an instance's metadata, which the script in Cloud Storage runs."""
        return str(self.bodies[name]["gceSetup"]["metadata"]["cavvy-script"])

    def _create(self, zone: str, name: str, body: dict[str, Any]) -> None:
        if wrong := _refusal(name, body):
            raise CloudFault(400, "INVALID_ARGUMENT", wrong)
        if any(each.name == name and self._zone(each.id) == zone for each in self.cloud.billed()):
            raise CloudFault(409, "ALREADY_EXISTS", f"Resource {name} already exists")
        self.bodies[name] = body
        before = len(self.cloud.machines)
        try:
            self.start_notebook(name, body)
        finally:  # a fault may be reported although the machine was made
            for made in self.cloud.machines[before:]:
                self._zones[made.id] = zone

    def _zone(self, machine: str) -> str:
        """The zone of a machine; that of a second machine with the same name is another one."""
        return self._zones.setdefault(machine, ZONES[-1])

    def _find(self, zone: str, given: Mapping[str, str], *, shown: bool = True) -> CloudMachine:
        """The instance of a path. It is read only after the listing lag, and deleted at any
        time.
        """
        for each in self.cloud.billed():
            if each.name == given["instancesId"] and self._zone(each.id) == zone:
                if shown:
                    return self.machine(each.id)
                return CloudMachine(id=each.id, name=each.name, state=MachineState.RUNNING)
        raise CloudFault(404, "NOT_FOUND", f"Resource {given['instancesId']} was not found")

    def _delete(self, machine: CloudMachine) -> None:
        if machine.name in self.keeps:
            return
        self.end(machine.id)

    def _operation(self, zone: str, name: str) -> dict[str, Any]:
        told: dict[str, Any] = {
            "name": f"projects/{PROJECT}/locations/{zone}/operations/{name}",
            "done": name in self.errors,
        }
        if name in self.errors:
            told["error"] = {"code": 8, "message": self.errors[name]}
        return told

    def _checked(self, schema: str, told: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.api.check_value(schema, told)
        return 200, told

    def _show(self, machine: CloudMachine) -> dict[str, Any]:
        assert machine.created_at is not None
        zone, body = self._zone(machine.id), self.bodies[machine.name]
        told = {
            **body,
            "name": f"projects/{PROJECT}/locations/{zone}/instances/{machine.name}",
            "state": self.states[machine.state],
            "createTime": _text(machine.created_at),
            "updateTime": _text(machine.created_at),
        }
        if machine.state is MachineState.RUNNING:
            told["proxyUri"] = f"{machine.id}-dot-{zone}.notebooks.googleusercontent.com"
        return told

    def _list(self, zone: str, query: Mapping[str, str]) -> dict[str, Any]:
        shown = [self._show(each) for each in self.machines() if self._zone(each.id) == zone]
        number, size = int(query.get("pageToken", 1)), int(query.get("pageSize", 50))
        cut, more = self.cut(shown, number, size)
        return {"instances": list(cut), **({"nextPageToken": str(number + 1)} if more else {})}


def _text(time: datetime) -> str:
    return time.isoformat().replace("+00:00", "Z")


def _refusal(name: str, body: dict[str, Any]) -> str:
    """What Google's documentation does not allow, beyond the description."""
    setup, labels = body["gceSetup"], body["labels"]
    machine, gpus = setup["machineType"], setup.get("acceleratorConfigs", [])
    if not _ID.fullmatch(name):
        return "instance_id is wrong"
    if any(not _LABEL.fullmatch(each) for each in [*labels, *labels.values()]):
        return "a label has characters that are not allowed"
    if not MACHINE_TYPES.fullmatch(machine):
        return f"Machine type {machine} does not exist"
    if _WITH_GPU.match(machine) and not gpus:
        return "this machine type needs accelerators"
    if len(gpus) > 1 or len(setup["dataDisks"]) != 1:
        return "one accelerator configuration and one data disk are supported"
    if any(len(each.encode()) > 256 * 1024 for each in setup["metadata"].values()):
        return "a value of the metadata is too long"
    if not setup["metadata"]["post-startup-script"].startswith("gs://"):
        return "post-startup-script must be a Cloud Storage URI"
    return ""

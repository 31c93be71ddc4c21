"""A strict stand-in for the Cloud TPU API over a cloud in memory: an HTTP server that checks each
request and each of its own replies against Google's discovery document. It lists in pages. A slice
is one node with several machines, and a zone without capacity is reported by the operation.

The messages are those that Google's users reported, as of November 2026. Google documents neither
how long a slice may be missing from lists nor when a failed creation is told.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl

from tests.contract.gcp_stand_in import PROJECT, GoogleStandIn
from tests.contract.google_description import describe_api

from cavvy.catalog.tpu_slices import find_slice
from cavvy.providers.contract.rest_stand_in import RestRequest, name_states
from cavvy.providers.tpu.cloud import rename
from cavvy.providers.vm.cloud import CloudFault, CloudMachine, MachineState

ZONES = ("us-central1-a", "us-central1-b", "europe-west4-b", "me-west1-a")  # the last: no prices
TYPES = ("v5litepod-1", "v5litepod-4", "v5litepod-8", "v5litepod-16", "v5p-16", "v9-8")
QUOTAS = tuple(
    f"TPU{kind}PerProjectPerZoneForTPUAPI"
    for kind in ("V5sLitepod", "V5sLitepodPreemptible", "V5sLitepodServing", "V5P")
)
RUNTIMES = ("v2-alpha-tpuv5-lite", "v2-alpha-tpuv5", "v2-alpha-tpuv6e", "tpu-ubuntu2204-base")
_NO_CAPACITY = (
    'There is no more capacity in the zone "{}"; you can try in another zone where Cloud TPU Nodes '
    "are offered (see https://cloud.google.com/tpu/docs/regions)"
)


@dataclass(kw_only=True)
class Slice:
    """One node of the API, and the machines that are its workers."""

    zone: str
    name: str
    body: dict[str, Any]
    machines: list[str] = field(default_factory=list)


class TpuStandIn(GoogleStandIn):
    """The API, and Google's token service, in front of a cloud in memory."""

    # what the cloud sells, as its prices and types state it
    sells = """
    # type            places                                               accelerators     CPUs  memory  disk    price  spot
    tpu-v5litepod-16  europe-west4/europe-west4-b                          4xTPU-v5e/16GiB  112   192GiB  100GiB  6.24   1.61812
    tpu-v5litepod-1   europe-west4/europe-west4-b                          1xTPU-v5e/16GiB  24    48GiB   100GiB  1.56   0.40453
    tpu-v5litepod-4   europe-west4/europe-west4-b                          4xTPU-v5e/16GiB  112   192GiB  100GiB  6.24   1.61812
    tpu-v5litepod-8   europe-west4/europe-west4-b                          8xTPU-v5e/16GiB  224   384GiB  100GiB  12.48  3.23624
    tpu-v5p-16        europe-west4/europe-west4-b                          4xTPU-v5p/95GiB  208   448GiB  100GiB  17.01  5.394
    tpu-v5litepod-16  us-central1/us-central1-a,us-central1/us-central1-b  4xTPU-v5e/16GiB  112   192GiB  100GiB  4.8    0.97972
    tpu-v5litepod-1   us-central1/us-central1-a,us-central1/us-central1-b  1xTPU-v5e/16GiB  24    48GiB   100GiB  1.2    0.24493
    tpu-v5litepod-4   us-central1/us-central1-a,us-central1/us-central1-b  4xTPU-v5e/16GiB  112   192GiB  100GiB  4.8    0.97972
    tpu-v5litepod-8   us-central1/us-central1-a,us-central1/us-central1-b  8xTPU-v5e/16GiB  224   384GiB  100GiB  9.6    1.95944
    tpu-v5p-16        us-central1/us-central1-a,us-central1/us-central1-b  4xTPU-v5p/95GiB  208   448GiB  100GiB  16.8   3.714208
    """

    denied = CloudFault(401, "UNAUTHENTICATED", "Invalid Credentials")
    faults: Mapping[str, CloudFault] = {
        "not-found": CloudFault(404, "NOT_FOUND", "Resource not found"),
        "forbidden": CloudFault(403, "PERMISSION_DENIED", "tpu.nodes.create is required"),
        "too-many-requests": CloudFault(
            429, "RESOURCE_EXHAUSTED", "Quota exceeded for quota metric 'Requests'"
        ),
        "internal-error": CloudFault(500, "INTERNAL", "an internal error has occurred"),
        "unavailable": CloudFault(503, "UNAVAILABLE", "The service is currently unavailable."),
        "quota-exceeded": CloudFault(
            429,
            "RESOURCE_EXHAUSTED",
            "Quota limit 'TPUV5sLitepodPerProjectPerZoneForTPUAPI' has been exceeded. Limit: 0 in "
            "zone us-central1-a.",
        ),
    }
    states = name_states(starting="CREATING", running="READY", stopped="STOPPED")

    def set_up(self) -> None:
        self.url = f"{self.origin}/v2"
        self.settings = {"quotas_endpoint": f"{self.origin}/quotas"}
        self.api = describe_api("tpu.v2")
        self.slices: list[Slice] = []
        self.operations: list[dict[str, Any]] = []
        self.preempted: set[str] = set()  # names of slices
        self.unreachable: list[str] = []  # zones
        self.faulty: dict[str, CloudFault] = {}  # zones that list no types
        self.limits: dict[tuple[str, str], int] = {}  # by zone and name of the quota
        self.hides_quotas = False  # whether requests for quotas are refused
        self.full_later = False  # whether creations are accepted, and then fail
        self.calls: list[tuple[str, str]] = []  # the method and the path of each change

    def reply(
        self, method: str, target: str, headers: Mapping[str, str], content: bytes
    ) -> tuple[int, object] | None:
        """Also plays the Cloud Quotas API, which knows the quotas of TPUs."""
        path, _, query = target.partition("?")
        if not path.endswith("/quotaInfos"):
            return super().reply(method, target, headers, content)
        if self.hides_quotas:
            error = {
                "code": 403,
                "status": "PERMISSION_DENIED",
                "message": "cloudquotas.quotas.get",
            }
            return 403, {"error": error}
        owner = f"projects/{PROJECT}/locations/global/services/tpu.googleapis.com"
        assert path.endswith(f"/quotas/{owner}/quotaInfos")
        assert headers["authorization"] == f"Bearer {self.key}"
        page = self._page("quotaInfos", self._list_quotas(owner), dict(parse_qsl(query)))
        return 200, page

    def _list_quotas(self, owner: str) -> list[dict[str, Any]]:
        """In the form of Google's reference, with a value for all zones and for some."""
        return [
            {
                "name": f"{owner}/quotaInfos/{name}",
                "quotaId": name,
                "metric": "tpu.googleapis.com/tpu",
                "service": "tpu.googleapis.com",
                "containerType": "PROJECT",
                "dimensions": ["zone"],
                "quotaDisplayName": f"{name} per project per zone",
                "dimensionsInfos": [
                    {"details": {"value": "100000"}, "applicableLocations": list(ZONES)},
                    *(
                        {
                            "dimensions": {"zone": zone},
                            "details": {"value": str(limit)},
                            "applicableLocations": [zone],
                        }
                        for (zone, of), limit in self.limits.items()
                        if of == name
                    ),
                ],
            }
            for name in (*QUOTAS, "RequestsPerMinutePerProject")
        ]

    def answer(self, request: RestRequest) -> tuple[int, object]:
        name, given = self.api.read_request(
            request.method, request.path, request.query, request.body
        )
        if given["projectsId"] != PROJECT:
            raise CloudFault(403, "PERMISSION_DENIED", f"project {given['projectsId']}")
        if request.method != "GET":
            self.calls.append((request.method, request.path))
        self._adopt_strays()
        schema, reply = self._answer(name, given, request.query, request.body)
        self.api.check_value(schema, reply)
        if schema == "ListNodesResponse":
            reply["nodes"] = [*reply["nodes"], *self.others]
        return 200, reply

    def _answer(
        self, name: str, given: dict[str, str], query: Mapping[str, str], body: Any
    ) -> tuple[str, dict[str, Any]]:
        zone, node = given.get("locationsId", ""), given.get("nodesId", "")
        root = f"projects/{PROJECT}/locations"
        match name.removeprefix("tpu.projects.locations."):
            case "list":
                shown = [{"name": f"{root}/{each}", "locationId": each} for each in ZONES]
                return "ListLocationsResponse", self._page("locations", shown, query)
            case "acceleratorTypes.list":
                if zone in self.faulty:
                    raise self.faulty[zone]
                types = [
                    {"name": f"{root}/{zone}/acceleratorTypes/{each}", "type": each}
                    for each in TYPES
                ]
                return "ListAcceleratorTypesResponse", self._page("acceleratorTypes", types, query)
            case "nodes.list":
                assert zone == "-"
                nodes = [told for each in self.slices if (told := self._show(each))]
                page = self._page("nodes", nodes, query)
                lost = [f"{root}/{each}" for each in self.unreachable]
                return "ListNodesResponse", {**page, **({"unreachable": lost} if lost else {})}
            case "nodes.get":
                return "Node", self._find(zone, node)[1]
            case "nodes.create":
                return "Operation", self._create(zone, query["nodeId"], body)
            case "nodes.delete":
                return "Operation", self._delete(zone, node)
            case "operations.list":
                there = [each for each in self.operations if f"/{zone}/" in each["name"]]
                return "ListOperationsResponse", self._page("operations", there, query)
        raise CloudFault(501, "UNIMPLEMENTED", name)

    def _page(
        self, kind: str, items: list[dict[str, Any]], query: Mapping[str, str]
    ) -> dict[str, Any]:
        number = int(query.get("pageToken", 1))
        shown, more = self.cut(items, number, int(query.get("pageSize", 100)))
        return {kind: list(shown), **({"nextPageToken": str(number + 1)} if more else {})}

    def _create(self, zone: str, name: str, body: Any) -> dict[str, Any]:
        self._check(zone, name, body)
        if any((each.zone, each.name) == (zone, name) and self._live(each) for each in self.slices):
            raise CloudFault(409, "ALREADY_EXISTS", f"Resource {name} already exists")
        operation = self._operation("create", zone, name)
        made = Slice(zone=zone, name=name, body=body)
        known = find_slice(body["acceleratorType"])
        assert known is not None
        if self.full_later:
            error = {"code": 8, "message": _NO_CAPACITY.format(zone)}
            self.operations.append(self._finish(operation, error=error))
            return operation
        try:
            for worker in range(known.hosts):
                script = body["metadata"]["startup-script"]
                made.machines.append(self.start(rename(name, worker), script, body["labels"]))
        except CloudFault as fault:
            for each in made.machines:
                self.end(each)
            newest = self.cloud.machines[-1] if self.cloud.machines else None
            taken = {each for known in self.slices for each in known.machines}
            if newest is not None and newest.name == name and newest.id not in taken:
                self.slices.append(Slice(zone=zone, name=name, body=body, machines=[newest.id]))
            if fault.code != "insufficient-capacity":
                raise
            error = {"code": 8, "message": _NO_CAPACITY.format(zone)}
            return {**operation, "done": True, "error": error}
        self.slices.append(made)
        self.operations.append(self._finish(operation))
        return operation

    def _finish(self, operation: dict[str, Any], **result: Any) -> dict[str, Any]:
        metadata = {**operation["metadata"], "endTime": self.cloud.time.isoformat()}
        return {**operation, "done": True, "metadata": metadata, **result}

    def _check(self, zone: str, name: str, body: Any) -> None:
        """Raise the fault of a request that the description allows and Google refuses."""
        good = (
            zone in ZONES
            and re.fullmatch(r"[a-z]([-a-z0-9]{0,59}[a-z0-9])?", name)
            and body["acceleratorType"] in TYPES
            and body["runtimeVersion"] in RUNTIMES
            and body["networkConfig"]["network"] == "default"
            and len(body["metadata"]["startup-script"].encode()) <= 256 * 1024
            and all(re.fullmatch(r"[a-z][a-z0-9_-]{0,62}", each) for each in body["labels"])
            and all(re.fullmatch(r"[a-z0-9_-]{0,63}", each) for each in body["labels"].values())
        )
        if not good:
            raise CloudFault(400, "INVALID_ARGUMENT", "Cloud TPU received an invalid argument.")

    def _delete(self, zone: str, name: str) -> dict[str, Any]:
        found, _ = self._find(zone, name, hidden=True)
        for each in found.machines:
            self.end(each)
        operation = self._finish(self._operation("delete", zone, name))
        self.operations.append(operation)
        return operation

    def _operation(self, verb: str, zone: str, name: str) -> dict[str, Any]:
        root = f"projects/{PROJECT}/locations/{zone}"
        return {
            "name": f"{root}/operations/operation-{len(self.operations)}",
            "done": False,
            "metadata": {
                "createTime": self.cloud.time.isoformat(),
                "target": f"{root}/nodes/{name}",
                "verb": verb,
                "apiVersion": "v2",
            },
        }

    def _adopt_strays(self) -> None:
        """Machines that were not made by this API: second machines of a name, in other zones."""
        known = {machine for each in self.slices for machine in each.machines}
        for each in self.cloud.machines:
            if each.id not in known:
                taken = {other.zone for other in self.slices if other.name == each.name}
                zone = next(zone for zone in ZONES if zone not in taken)
                body = {"acceleratorType": "v5litepod-1", "labels": each.tags}
                self.slices.append(Slice(zone=zone, name=each.name, body=body, machines=[each.id]))

    def _live(self, found: Slice) -> bool:
        alive = {each.id for each in self.cloud.billed()}
        return bool(alive & set(found.machines))

    def _find(self, zone: str, name: str, *, hidden: bool = False) -> tuple[Slice, dict[str, Any]]:
        """A slice and what the API shows of it; also a hidden one if it is to be deleted."""
        for each in reversed(self.slices):
            if (each.zone, each.name) == (zone, name) and self._live(each):
                told = self._show(each, by_id=True)
                if told or hidden:
                    return each, told
        raise self.faults["not-found"]

    def _show(self, found: Slice, *, by_id: bool = False) -> dict[str, Any]:
        """The node; {} if one of its machines is not there or not listed yet."""
        listed = {each.id: each for each in self.machines()}
        workers: list[CloudMachine] = []
        for each in found.machines:
            try:
                workers.append(self.machine(each) if by_id else listed[each])
            except (CloudFault, KeyError):
                return {}
        order = [MachineState.STOPPED, MachineState.STARTING, MachineState.RUNNING]
        worst = min((each.state for each in workers), key=order.index)
        created = workers[0].created_at
        assert created is not None
        return {
            "name": f"projects/{PROJECT}/locations/{found.zone}/nodes/{found.name}",
            "state": "PREEMPTED" if found.name in self.preempted else self.states[worst],
            "createTime": created.isoformat(),
            **{key: value for key, value in found.body.items() if key != "metadata"},
            "networkEndpoints": [
                {"ipAddress": each.address, "port": 8470} for each in workers if each.address
            ],
        }

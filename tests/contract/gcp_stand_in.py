"""A strict stand-in for the Compute Engine API over a cloud in memory: an HTTP server that checks
each request and each of its own replies against Google's discovery document. It lists in pages, its
operations take time, and a zone without capacity is reported by the operation.
"""

import json
import re
from collections.abc import Mapping
from datetime import datetime, timedelta
from functools import cache
from ipaddress import ip_network
from types import MappingProxyType
from typing import Any
from urllib.parse import parse_qsl
from uuid import UUID

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from google.auth import jwt
from tests.contract.google_description import describe_api

from cavvy.domain.tasks import Scalar
from cavvy.providers.contract.memory_cloud import Rented
from cavvy.providers.contract.rest_stand_in import RestRequest, RestStandIn, name_states
from cavvy.providers.vm.cloud import CloudFault, CloudMachine, MachineState

PROJECT = "research-42"
ZONES = ("us-central1-a", "us-central1-b", "europe-west4-a")
TYPES = {  # name: vCPUs, MiB of memory, GPU, GPUs
    "e2-standard-4": (4, 16384, None, 0),
    "g2-standard-4": (4, 16384, "nvidia-l4", 1),
    "a2-highgpu-1g": (12, 87040, "nvidia-tesla-a100", 1),
    "a3-highgpu-8g": (208, 1916928, "nvidia-h100-80gb", 8),
    "e2-standard-2": (2, 8192, "nvidia-rtx-pro-6000", 1),  # the catalog knows no GPU
    "n1-standard-8": (8, 30720, None, 0),
    "ct6e-standard-8t": (180, 1474560, "ct6e", 8),
    "a4-highgpu-8g": (224, 4063232, "nvidia-b200", 8),  # without a price
    "e2-standard-8": (8, 32768, None, 0),
}
DEPRECATED = "e2-standard-8"
METRICS = {  # by name: the machine types that count, and whether only spot machines count
    "CPUS": (("e2-", "n1-"), False),
    "A2_CPUS": (("a2-",), False),
    "NETWORKS": ((), False),
    "NVIDIA_L4_GPUS": (("g2-",), False),
    "PREEMPTIBLE_NVIDIA_L4_GPUS": (("g2-",), True),
    "NVIDIA_A100_GPUS": (("a2-",), False),
    "COMMITTED_NVIDIA_L4_GPUS": ((), False),
    "PREEMPTIBLE_NVIDIA_H100_GPUS": (("a3-",), True),
    "PREEMPTIBLE_CPUS": (("e2-", "n1-", "a2-", "g2-"), True),
}
IMAGES = (
    "projects/ubuntu-os-cloud/global/images/family/ubuntu-2404-lts-amd64",
    "projects/deeplearning-platform-release/global/images/family/common-cu129-ubuntu-2204-nvidia-580",
    "projects/ubuntu-os-accelerator-images/global/images/family/"
    "ubuntu-accelerator-2404-amd64-with-nvidia-580",
    "projects/ubuntu-os-accelerator-images/global/images/family/"
    "ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e",
)
GPUS = {"nvidia-tesla-t4": ZONES[:1]}  # the types of GPUs that N1 machines accept, with their zones


def _sku(description: str, usage: str, nanos: int, unit: str = "h") -> dict[str, Any]:
    """A SKU of Google's list: https://cloud.google.com/billing/docs/reference/rest."""
    price = {"currencyCode": "USD", "units": "0", "nanos": nanos}
    free = {"startUsageAmount": 0, "unitPrice": {"currencyCode": "USD", "units": "0", "nanos": 0}}
    tiers = [free, {"startUsageAmount": 744, "unitPrice": price}]
    expression = {"usageUnit": unit, "tieredRates": tiers}
    regions = ["global"] if "External IP" in description else ["us-central1"]
    return {
        "description": description,
        "category": {"usageType": usage},
        "serviceRegions": regions,
        "pricingInfo": [{"pricingExpression": expression}],
    }


PRICES = [
    _sku("Balanced PD Capacity", "OnDemand", 100_000_000, "GiBy.mo"),
    _sku("SSD backed PD Capacity", "OnDemand", 170_000_000, "GiBy.mo"),
    _sku("Hyperdisk Balanced Capacity in Iowa", "OnDemand", 80_000_000, "GiBy.mo"),
    _sku("Regional Balanced PD Capacity in Iowa", "OnDemand", 200_000_000, "GiBy.mo"),
    _sku("External IP Charge on a Standard VM", "OnDemand", 5_000_000),
    _sku("External IP Charge on a Spot Preemptible VM", "Preemptible", 2_500_000),
]
A2_PRICES = [
    _sku("A2 Instance Core running in Americas", "OnDemand", 31_611_000),
    _sku("A2 Instance Ram running in Americas", "OnDemand", 4_237_000, "GiBy.h"),
    _sku("Nvidia Tesla A100 GPU running in Americas", "OnDemand", 999_000_000),
]
# faults of the cloud in memory that Google reports by the operation, after it accepted the request
_BY_OPERATION = {
    "insufficient-capacity": CloudFault(
        503, "ZONE_RESOURCE_POOL_EXHAUSTED", "The zone does not have enough resources available"
    ),
    "quota-exceeded": CloudFault(403, "QUOTA_EXCEEDED", "Quota 'NVIDIA_L4_GPUS' exceeded"),
}


class GoogleStandIn(RestStandIn):
    """An API of Google, and Google's token service."""

    key = "ya29.test"
    denied = CloudFault(401, "authError", "Invalid Credentials")

    def reply(
        self, method: str, target: str, headers: Mapping[str, str], content: bytes
    ) -> tuple[int, object] | None:
        """Also plays Google's token service, which knows one account."""
        if not target.endswith("/token"):
            return super().reply(method, target, headers, content)
        try:
            assertion = dict(parse_qsl(content.decode()))["assertion"]
            claims = jwt.decode(assertion, certs=make_key()[1])
        except ValueError:
            return 400, {"error": "invalid_grant", "error_description": "Invalid JWT Signature."}
        assert claims["scope"] == "https://www.googleapis.com/auth/cloud-platform"
        return 200, {"access_token": self.key, "expires_in": 3600, "token_type": "Bearer"}

    def describe(self, fault: CloudFault) -> object:
        error = {"code": fault.status, "message": fault.message, "status": fault.code}
        return {"error": error}

    def make_key_file(self) -> str:
        """The content of the service account's key file."""
        told = {
            "type": "service_account",
            "project_id": PROJECT,
            "private_key_id": "1",
            "private_key": make_key()[0],
            "client_email": f"cavvy@{PROJECT}.iam.gserviceaccount.com",
            "client_id": "1",
            "token_uri": f"{self.origin}/token",
        }
        return json.dumps(told)


class GcpStandIn(GoogleStandIn):
    """The API, Google's token service and its list of prices, in front of a cloud in memory."""

    # what the cloud sells, as its prices and types state it
    sells = """
    # type              places                                               accelerators     CPUs  memory   disk  price       spot
    a2-highgpu-1g       europe-west4/europe-west4-a                          1xA100/40GiB     12    85GiB    -     3.747972    1.692835
    a3-highgpu-8g       europe-west4/europe-west4-a                          8xH100/80GiB     208   1872GiB  -     112.540479  44.118779
    e2-standard-4       europe-west4/europe-west4-a                          -                4     16GiB    -     0.147544    0.070528
    g2-standard-4       europe-west4/europe-west4-a                          1xL4/24GiB       4     16GiB    -     0.742916    0.38986
    tpu-v6e-8           europe-west4/europe-west4-a                          8xTPU-v6e/32GiB  180   1440GiB  -     23.76       8.29984
    a2-highgpu-1g       us-central1/us-central1-a,us-central1/us-central1-b  1xA100/40GiB     12    85GiB    -     3.673385    1.92802
    a3-highgpu-8g       us-central1/us-central1-a,us-central1/us-central1-b  8xH100/80GiB     208   1872GiB  -     88.49       50.609541
    e2-standard-4       us-central1/us-central1-a,us-central1/us-central1-b  -                4     16GiB    -     0.134023    0.080424
    g2-standard-4       us-central1/us-central1-a,us-central1/us-central1-b  1xL4/24GiB       4     16GiB    -     0.706832    0.397336
    n1-standard-8-t4x1  us-central1/us-central1-a                            1xT4/16GiB       8     30GiB    -     0.729998    0.30902
    tpu-v6e-8           us-central1/us-central1-a,us-central1/us-central1-b  8xTPU-v6e/32GiB  180   1440GiB  -     21.6        4.5828
    """
    extras = (
        "disk pd-balanced 0.1",
        "disk pd-ssd 0.17",
        "disk hyperdisk-balanced 0.08",
        "address 0.005",
        "address 0.0025",  # spot
    )
    minimum_charges = MappingProxyType({"": timedelta(minutes=1)})

    root = "/compute/v1"
    faults: Mapping[str, CloudFault] = {
        "not-found": CloudFault(404, "notFound", "The resource was not found"),
        "too-many-requests": CloudFault(403, "rateLimitExceeded", "Rate Limit Exceeded"),
        "internal-error": CloudFault(500, "backendError", "Backend Error"),
        "unavailable": CloudFault(503, "backendError", "Backend Error"),
    }
    states = name_states(starting="STAGING", running="RUNNING", stopped="TERMINATED")

    def set_up(self) -> None:
        self.settings: Mapping[str, Scalar] = {"prices_endpoint": self.origin}
        self.prices = list(PRICES)
        self.hides_prices = False  # whether requests for Google's list of prices are refused
        self.api = describe_api("compute.v1")
        self.bodies: dict[str, dict[str, Any]] = {}  # of insertions, by machine
        self.zones: dict[str, str] = {}
        self.operations: dict[str, dict[str, Any]] = {}  # insertions, by their tokens
        self.preempted: set[str] = set()
        self.networks = ["default"]
        # resources that requests have made, by path, with the name of their operation
        self.made: dict[str, tuple[dict[str, Any], str]] = {}
        self.may_network = True  # whether the account may create networks
        self.network_fault: CloudFault | None = None  # told by the operations that make networks
        self.unreachable: list[str] = []  # zones
        self.hides_operations = False  # whether requests for the list of operations are refused
        self.refusals: list[CloudFault] = []  # of the next insertions, told by their operations
        self.hides_quotas = False  # whether requests for the list of regions are refused
        self.limits: dict[tuple[str, str], int] = {}  # by region ("" for all) and metric
        self.operation_time = timedelta(seconds=10)
        self.deletion_time = timedelta(0)  # a machine that is being deleted is shown as STOPPING
        self._ending: dict[str, datetime] = {}  # by machine: when its deletion began
        self._stopped: dict[str, datetime] = {}

    def reply(
        self, method: str, target: str, headers: Mapping[str, str], content: bytes
    ) -> tuple[int, object] | None:
        """Also plays Google's list of prices, in pages of three."""
        path, _, query = target.partition("?")
        if not path.endswith("/v1/services/6F81-5844-456A/skus"):
            return super().reply(method, target, headers, content)
        assert method == "GET"
        if headers.get("authorization") != f"Bearer {self.key}" or self.hides_prices:
            return 403, {"error": {"code": 403, "message": "Cloud Billing API is not enabled"}}
        start = int(dict(parse_qsl(query)).get("pageToken", 0))
        more = {"nextPageToken": str(start + 3)} if start + 3 < len(self.prices) else {}
        return 200, {"skus": self.prices[start : start + 3], **more}

    @property
    def undelivered(self) -> bool:
        """Whether an insertion has failed, and its error was not told yet."""
        return any("error" in each and each["status"] != "DONE" for each in self._known())

    def describe(self, fault: CloudFault) -> object:
        error = {"message": fault.message, "domain": "global", "reason": fault.code}
        return {"error": {"code": fault.status, "message": fault.message, "errors": [error]}}

    def answer(self, request: RestRequest) -> tuple[int, object]:
        query = dict(request.query)
        self._end_deletions()
        name, given = self.api.read_request(request.method, request.path, query, request.body)
        if given["project"] != PROJECT:
            link = f"projects/{given['project']}"
            raise CloudFault(404, "notFound", f"The resource '{link}' was not found")
        schema, reply = self._answer(name.removeprefix("compute."), given, query, request.body)
        self.api.check_value(schema, reply)
        return 200, reply

    def _answer(
        self, name: str, given: dict[str, str], query: dict[str, str], body: Any
    ) -> tuple[str, dict[str, Any]]:
        match name:
            case "machineTypes.aggregatedList":
                shown = [_type(zone, each) for zone in ZONES for each in TYPES]
                return "MachineTypeAggregatedList", self._page("machineTypes", shown, query)
            case "acceleratorTypes.aggregatedList":
                link = "https://www.googleapis.com/compute/v1/projects/x/zones/"
                listed = [
                    {"name": gpu, "zone": f"{link}{zone}", "maximumCardsPerInstance": 4}
                    for gpu, zones in GPUS.items()
                    for zone in zones
                ]
                return "AcceleratorTypeAggregatedList", self._page(
                    "acceleratorTypes", listed, query
                )
            case "instances.aggregatedList":
                shown = [*map(self._show, self.machines()), *self.others]
                return "InstanceAggregatedList", self._page("instances", shown, query)
            case "instances.get":
                return "Instance", self._show(self._find(given))
            case "instances.insert":
                return "Operation", self._insert(given["zone"], query["requestId"], body)
            case "instances.delete":
                return "Operation", self._delete(given)
            case "projects.get" | "regions.list":
                return self._tell_quotas(name)
            case "zoneOperations.get" | "globalOperations.get" | "regionOperations.get":
                return "Operation", self._ask(given["operation"])
            case "zoneOperations.list":
                if self.hides_operations:
                    raise CloudFault(403, "forbidden", "compute.zoneOperations.list is required")
                return "OperationList", self._page_of_operations(query)
        return self._answer_network(name, given, body)

    def _answer_network(
        self, name: str, given: dict[str, str], body: Any
    ) -> tuple[str, dict[str, Any]]:
        match name:
            case "networks.get" | "subnetworks.get" | "firewalls.get":
                return self._get_made(name, given)
            case "networks.insert" | "subnetworks.insert" | "firewalls.insert":
                return "Operation", self._make(name, given, body)
        raise CloudFault(501, "notImplemented", name)

    def _get_made(self, name: str, given: dict[str, str]) -> tuple[str, dict[str, Any]]:
        kind = name.partition(".")[0]
        resource = given[kind.removesuffix("s")]
        path = f"{given.get('region', 'global')}/{kind}/{resource}"
        body, operation = self.made.get(path, ({}, ""))
        known = operation in self.operations  # Google forgets operations
        if not body or (known and self._ask(operation)["status"] != "DONE"):
            link = f"projects/{PROJECT}/global/{kind}/{resource}"
            raise CloudFault(404, "notFound", f"The resource '{link}' was not found")
        return kind.removesuffix("s").capitalize(), body

    def _make(self, name: str, given: dict[str, str], body: Any) -> dict[str, Any]:
        kind, place = name.partition(".")[0], given.get("region", "global")
        path = f"{place}/{kind}/{body['name']}"
        if not self.may_network:
            raise CloudFault(403, "forbidden", f"Required 'compute.{kind}.create' permission")
        if path in self.made:
            raise CloudFault(409, "alreadyExists", f"The resource '{path}' already exists")
        assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", body["name"])
        if kind == "networks":
            assert body["autoCreateSubnetworks"] is False
            assert 1300 <= body["mtu"] <= 8896
            profile = body.get("networkProfile", "").rpartition("/")[2]
            assert profile in ("", *(f"{zone}-vpc-roce" for zone in ZONES))
        else:  # the network must be ready
            network = body["network"].rpartition("/")[2]
            self._get_made("networks.get", {"network": network})
        if kind == "subnetworks":
            others = [
                ip_network(each["ipCidrRange"])
                for other, (each, _) in self.made.items()
                if other.split("/")[1] == kind and each["network"] == body["network"]
            ]
            assert not any(each.overlaps(ip_network(body["ipCidrRange"])) for each in others)
        operation = self._operation("insert", ZONES[0], body["name"], f"make-{kind}-{body['name']}")
        operation["status"] = "RUNNING" if self.operation_time else "DONE"
        if self.network_fault is None:
            self.made[path] = body, operation["name"]
        else:
            fault = self.network_fault
            errors = [{"code": fault.code, "message": fault.message}]
            operation |= {"error": {"errors": errors}, "httpErrorStatusCode": fault.status}
        self.operations[operation["name"]] = operation
        return operation

    def _check_interfaces(self, zone: str, kind: str, interfaces: list[Any]) -> None:
        """The networks of the usual kind differ; RDMA cards need the profile of the zone."""
        region, usual = zone.rpartition("-")[0], []
        for each in interfaces:
            network, subnet = (each[name].rpartition("/")[2] for name in ("network", "subnetwork"))
            made, _ = self.made[f"global/networks/{network}"]
            part, operation = self.made[f"{region}/subnetworks/{subnet}"]
            assert self._ask(operation)["status"] == "DONE"
            assert part["network"] == each["network"]
            rdma = each["nicType"] == "MRDMA"
            assert made.get("networkProfile", "").endswith(f"/{zone}-vpc-roce") == rdma
            usual += [] if rdma else [network]
            assert "accessConfigs" not in each
        assert len(set(usual)) == len(usual)
        assert not interfaces or kind.startswith(("a3-", "a4-"))

    def _tell_quotas(self, method: str) -> tuple[str, dict[str, Any]]:
        """The project or its regions, with their quotas."""
        if method == "projects.get":
            quotas = [self._quota("", each) for each in ("CPUS_ALL_REGIONS", "GPUS_ALL_REGIONS")]
            return "Project", {"kind": "compute#project", "name": PROJECT, "quotas": quotas}
        if self.hides_quotas:
            raise CloudFault(403, "forbidden", "compute.regions.list is required")
        regions = sorted({zone.rpartition("-")[0] for zone in ZONES})
        shown = [
            {"name": each, "quotas": [self._quota(each, metric) for metric in METRICS]}
            for each in regions
        ]
        return "RegionList", {"kind": "compute#regionList", "items": shown}

    def _quota(self, region: str, metric: str) -> dict[str, Any]:
        """A quota and its use. A spot quota of 0 is one that Google has not granted: spot machines
        then count for the other quota.
        """
        starts, spot = METRICS.get(metric, (("",), False))
        limit = self.limits.get((region, metric), 0 if spot else 100_000)
        granted = self.limits.get((region, f"PREEMPTIBLE_{metric}"), 0) > 0
        used = 0
        for each in self.cloud.billed():
            body = self.bodies.get(each.id) or {}
            kind = str(body.get("machineType", "zones/-/machineTypes/e2-standard-4"))
            kind = kind.rpartition("/")[2]
            there = self._zone(each.id).startswith(region)
            bought = (body.get("scheduling") or {}).get("provisioningModel") == "SPOT"
            counts = limit > 0 and bought if spot else not (bought and granted)
            if there and kind.startswith(tuple(starts)) and counts:
                used += TYPES[kind][3] if "GPUS" in metric else TYPES[kind][0]
        return {"metric": metric, "limit": limit, "usage": used}

    def start_one(self, kind: str, zone: str) -> str:
        """Someone else starts a machine; returns its id."""
        machine = self.start("theirs", "#!/bin/sh\n", {})
        self.zones[machine] = zone
        self.bodies[machine] = {"machineType": f"zones/{zone}/machineTypes/{kind}"}
        return machine

    def _zone(self, machine: str) -> str:
        """The zone of a machine; a second machine of one name is in another zone."""
        if machine not in self.zones:
            name = self._rented(machine).name
            taken = {self.zones[each.id] for each in self.cloud.machines if each.name == name
                     and each.id in self.zones}  # fmt: skip
            self.zones[machine] = next(each for each in ZONES if each not in taken)
        return self.zones[machine]

    def _rented(self, machine: str) -> Rented:
        return next(each for each in self.cloud.machines if each.id == machine)

    def _find(self, given: dict[str, str]) -> CloudMachine:
        wanted = given["zone"], given["instance"]
        for each in self.cloud.machines:
            if (self._zone(each.id), each.name) == wanted and each.ended is None:
                return self.machine(each.id)
        link = f"projects/{PROJECT}/zones/{wanted[0]}/instances/{wanted[1]}"
        raise CloudFault(404, "notFound", f"The resource '{link}' was not found")

    def _insert(self, zone: str, token: str, body: Any) -> dict[str, Any]:
        assert str(UUID(token)) == token
        if token in self.operations:
            return self.operations[token]
        self._check(zone, body)
        name, taken = body["name"], [each for each in self.cloud.billed()]
        if any((self._zone(each.id), each.name) == (zone, name) for each in taken):
            raise CloudFault(409, "alreadyExists", f"The resource '{name}' already exists")
        new, refusal = "", None
        if self.refusals:
            return self._begin(zone, token, body, new, self.refusals.pop())
        try:
            (item,) = body["metadata"]["items"]
            new = self.start(name, item["value"], body["labels"])
        except CloudFault as fault:
            if fault.code not in _BY_OPERATION:
                newest = self.cloud.machines[-1] if self.cloud.machines else None
                if newest is not None and newest.id not in self.bodies and newest.name == name:
                    self._begin(zone, token, body, newest.id, None)  # only the reply is lost
                raise
            refusal = _BY_OPERATION[fault.code]
        return self._begin(zone, token, body, new, refusal)

    def _begin(
        self, zone: str, token: str, body: Any, new: str, refusal: CloudFault | None
    ) -> dict[str, Any]:
        if new:
            self.zones[new], self.bodies[new] = zone, body
        operation = self._operation("insert", zone, body["name"], f"operation-{token}")
        operation["status"] = "RUNNING" if self.operation_time else "DONE"
        if refusal is not None:
            errors = [{"code": refusal.code, "message": refusal.message}]
            operation |= {"error": {"errors": errors}, "httpErrorStatusCode": refusal.status}
        self.operations[token] = operation
        return operation

    def _check(self, zone: str, body: Any) -> None:
        """Raise the fault of a request that the description allows and Google refuses."""
        kind = body["machineType"].rpartition("/")[2]
        (disk,) = body["disks"]
        interface, *others = body["networkInterfaces"]
        self._check_interfaces(zone, kind, others)
        (item,) = body["metadata"]["items"]
        scheduling = body["scheduling"]
        network = interface["network"].rpartition("/")[2]
        if network not in self.networks:
            link = f"projects/{PROJECT}/global/networks/{network}"
            raise CloudFault(404, "notFound", f"The resource '{link}' was not found")
        gpus = body.get("guestAccelerators", [])
        tpu = kind.startswith("ct6e-")
        good = (
            body["machineType"] == f"zones/{zone}/machineTypes/{kind}"
            and kind in TYPES
            and disk["initializeParams"]["sourceImage"] in IMAGES
            and disk["initializeParams"]["diskType"].startswith(f"zones/{zone}/diskTypes/")
            and len(item["value"].encode()) <= 256 * 1024
            and (not tpu or disk["initializeParams"]["diskType"].endswith("/hyperdisk-balanced"))
            and all(zone in GPUS[each["acceleratorType"].rpartition("/")[2]] for each in gpus)
            and (not gpus or kind.startswith("n1-"))
            and (not (TYPES[kind][2] or gpus) or scheduling["onHostMaintenance"] == "TERMINATE")
            and (scheduling["provisioningModel"] == "SPOT")
            == (scheduling.get("instanceTerminationAction") == "DELETE")
            and all(re.fullmatch(r"[a-z][a-z0-9_-]{0,62}", each) for each in body["labels"])
            and all(re.fullmatch(r"[a-z0-9_-]{0,63}", each) for each in body["labels"].values())
        )
        if not good:
            raise CloudFault(400, "invalid", "Invalid value for a field")

    def _delete(self, given: dict[str, str]) -> dict[str, Any]:
        link = f"projects/{PROJECT}/zones/{given['zone']}/instances/{given['instance']}"
        for each in self.cloud.machines:
            place = self._zone(each.id), each.name
            if place == (given["zone"], given["instance"]) and each.ended is None:
                operation = self._operation("delete", given["zone"], each.name, f"end-{each.id}")
                if not self.deletion_time:
                    self.end(each.id)
                    return operation
                self._ending.setdefault(each.id, self.cloud.time)
                return {**operation, "status": "RUNNING"}
        raise CloudFault(404, "notFound", f"The resource '{link}' was not found")

    def _end_deletions(self) -> None:
        for machine, since in list(self._ending.items()):
            if self.cloud.time - since >= self.deletion_time:
                del self._ending[machine]
                self.end(machine)

    def _ask(self, name: str) -> dict[str, Any]:
        for each in self.operations.values():
            if each["name"] == name:
                each["status"] = "DONE" if self._is_over(each) else "RUNNING"
                return each
        raise CloudFault(404, "notFound", f"operation {name}")

    def _is_over(self, operation: dict[str, Any]) -> bool:
        since = datetime.fromisoformat(operation["insertTime"])
        return self.cloud.time - since >= self.operation_time

    def _page_of_operations(self, query: dict[str, str]) -> dict[str, Any]:
        """One page. The filter applies to the page, so pages may be empty although others follow."""
        number, size = int(query.get("pageToken", 1)), int(query.get("maxResults", 500))
        cut, more = self.cut(self._known(), number, size)
        shown = [each for each in cut if _fits(each, query.get("filter"))]
        following = {"nextPageToken": str(number + 1)} if more else {}
        return {"kind": "compute#operationList", "items": shown, **following}

    def _known(self) -> list[dict[str, Any]]:
        """All operations: insertions, and the ends of machines."""
        ends = []
        for each in self.cloud.machines:
            if each.ended is not None:
                kind = "compute.instances.preempted" if each.id in self.preempted else "delete"
                end = self._operation(kind, self._zone(each.id), each.name, f"end-{each.id}")
                ends.append({**end, "endTime": each.ended.isoformat()})
        return [*self.operations.values(), *ends]

    def _operation(self, kind: str, zone: str, machine: str, name: str) -> dict[str, Any]:
        root = f"{self.url}/projects/{PROJECT}/zones/{zone}"
        return {
            "kind": "compute#operation",
            "name": name,
            "zone": root,
            "operationType": kind,
            "targetLink": f"{root}/instances/{machine}",
            "status": "DONE",
            "insertTime": self.cloud.time.isoformat(),
        }

    def _show(self, machine: CloudMachine) -> dict[str, Any]:
        assert machine.created_at is not None
        zone, body = self._zone(machine.id), self.bodies.get(machine.id, {})
        root = f"{self.url}/projects/{PROJECT}/zones/{zone}"
        going = any(
            each["targetLink"] == f"{root}/instances/{machine.name}" and not self._is_over(each)
            for each in self.operations.values()
        )
        told: dict[str, Any] = {
            "kind": "compute#instance",
            "id": str(int(machine.id.removeprefix("vm-"))),
            "name": machine.name,
            "zone": root,
            "machineType": f"{root}/machineTypes/e2-standard-4",
            "status": "PROVISIONING" if going else self._state(machine),
            "labels": dict(machine.tags),
            "creationTimestamp": machine.created_at.isoformat(),
            "scheduling": body.get("scheduling", {}),
            "networkInterfaces": [{"name": "nic0"}],
        }
        if machine.state is MachineState.STOPPED:
            at = self._stopped.setdefault(machine.id, self.cloud.time)
            told["lastStopTimestamp"] = at.isoformat()
        if machine.address:
            told["networkInterfaces"] = [{"name": "nic0", "networkIP": machine.address}]
        return told

    def _state(self, machine: CloudMachine) -> str:
        return "STOPPING" if machine.id in self._ending else self.states[machine.state]

    def _page(
        self, kind: str, items: list[dict[str, Any]], query: dict[str, str]
    ) -> dict[str, Any]:
        """One page of an aggregated list: items by zone; zones without items carry a warning."""
        shown = [each for each in items if _fits(each, query.get("filter"))]
        number, size = int(query.get("pageToken", 1)), int(query.get("maxResults", 500))
        cut, more = self.cut(shown, number, size)
        scopes: dict[str, dict[str, Any]] = {
            f"zones/{zone}": {"warning": {"code": "NO_RESULTS_ON_PAGE"}} for zone in ZONES
        }
        for each in cut:
            zone = each["zone"].rpartition("/")[2]
            scopes[f"zones/{zone}"].pop("warning", None)
            scopes[f"zones/{zone}"].setdefault(kind, []).append(each)
        for zone in self.unreachable:
            scopes[f"zones/{zone}"] = {"warning": {"code": "UNREACHABLE"}}
        following = {"nextPageToken": str(number + 1)} if more else {}
        return {"items": scopes, **following}


def _fits(item: dict[str, Any], told: str | None) -> bool:
    """Whether an item passes a filter; this stand-in knows two forms."""
    if told is None:
        return True
    if labelled := re.fullmatch(r"labels\.([\w-]+):\*", told):
        return labelled[1] in item.get("labels", {})
    if matched := re.fullmatch(r'(\w+) eq "(.*)"', told):
        return re.fullmatch(matched[2], str(item.get(matched[1], ""))) is not None
    raise CloudFault(400, "invalid", f"Invalid list filter expression: {told}")


def _type(zone: str, name: str) -> dict[str, Any]:
    vcpus, memory, gpu, gpus = TYPES[name]
    told = {
        "kind": "compute#machineType",
        "name": name,
        "zone": zone,
        "guestCpus": vcpus,
        "memoryMb": memory,
        "architecture": "X86_64",
    }
    if gpu:
        told["accelerators"] = [{"guestAcceleratorType": gpu, "guestAcceleratorCount": gpus}]
    if name == DEPRECATED:
        told["deprecated"] = {"state": "DEPRECATED"}
    return told


@cache
def make_key() -> tuple[str, bytes]:
    """A private key and its public key, as PEM; short, since each provider checks the key when it
    reads it.
    """
    key = rsa.generate_private_key(public_exponent=65537, key_size=1024)
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    public = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return private.decode(), public

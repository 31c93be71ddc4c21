"""A strict stand-in for IBM Cloud's VPC API, its token service and its Global Catalog over a cloud
in memory: an HTTP server that refuses requests which the published descriptions do not allow, and
returns lists in pages.

The descriptions, read in November 2026: the VPC API with the models of IBM's Python package ibm-vpc
0.36.0 (version 2026-10-06), tokens (https://cloud.ibm.com/apidocs/iam-identity-token-api) and the
Global Catalog (https://cloud.ibm.com/apidocs/resource-catalog/global-catalog). That an instance's
price is in the metric `part-is.instance-hours-PROFILE` of the plan with the profile's name is what
users of the catalog report. IBM reports missing capacity as a reason of the status of an instance;
the refusal of a creation for that reason is made up, and so are the time that cluster networks
take, and the code of the refusal to delete one with instances.
"""

import itertools
import json
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

from cavvy.domain.tasks import Scalar
from cavvy.providers.contract import rest_stand_in as stand_in
from cavvy.providers.vm.cloud import CloudFault, CloudMachine, MachineState

HOME = "us-south"
REGIONS = (HOME, "eu-de")
# name: vCPUs, GiB of memory, GPU, GPUs, GiB of all GPUs, classes, USD per hour in us-south, spot
PROFILES: dict[str, tuple[int, int, str, int, int, str, float, float]] = {
    "bxf-2x8": (2, 8, "", 0, 0, "standard spot", 0.1, 0.04),
    "bx3d-8x40": (8, 40, "", 0, 0, "standard", 0.4968, 0),
    "cx2-2x4": (2, 4, "", 0, 0, "standard", 0.09, 0),  # no setting names it
    "bx2-8x32": (8, 32, "", 0, 0, "standard", 0, 0),  # its price is in the catalog only
    "gx2-8x64x1v100": (8, 64, "Tesla V100", 1, 16, "standard", 0, 0),  # the same
    "gx3-16x80x1l4": (16, 80, "L4", 1, 24, "standard spot", 1.0752, 0.4301),
    "gx3-24x120x1l40s": (24, 120, "L40S", 1, 48, "standard", 2.21, 0),
    "gx3d-160x1792x8h100": (160, 1792, "H100", 8, 640, "standard spot", 85.0, 24.8965),
    "gx3d-208x1792x8mi300x": (208, 1792, "MI300X", 8, 1536, "standard", 40.0, 0),
    "gx3d-160x1792x8h200": (160, 1792, "H200", 8, 1128, "standard", 0, 0),  # has no price
    "gx4-8x80x1z9000": (8, 80, "Z9000", 1, 99, "standard", 9.0, 0),  # an unknown GPU
}
IMAGES = {  # name: id, status, creation
    "ibm-ubuntu-24-04-3-minimal-amd64-2": ("a", "available", "2026-09-01T08:00:00Z"),
    "ibm-ubuntu-24-04-3-minimal-amd64-3": ("b", "available", "2026-10-01T08:00:00Z"),
    "ibm-ubuntu-24-04-3-minimal-amd64-4": ("c", "obsolete", "2026-11-01T08:00:00Z"),
    "ibm-ubuntu-22-04-5-minimal-amd64-9": ("d", "available", "2026-10-30T08:00:00Z"),
    "ibm-ubuntu-24-04-3-minimal-s390x-3": ("e", "available", "2026-10-30T08:00:00Z"),
    "our-image": ("f", "available", "2026-01-01T08:00:00Z"),
}
CLUSTERED = "gx3d-160x1792x8h100"  # the profile with cluster networks, in us-south-1
_SERVICE = "4b9bb8f5-0e11-45e6-9e5c-is-instance"
_GRANT = "urn:ibm:params:oauth:grant-type:apikey"
_TOKEN_S = 3600


def image_id(name: str) -> str:
    return f"r006-{IMAGES[name][0] * 8}-0000-0000-0000-{'0' * 12}"


def _table(fields: Mapping[str, stand_in.Check], *required: str) -> stand_in.Check:
    return lambda value: stand_in.wrong_field(value, fields, required) is None


def _size(value: object) -> bool:
    return isinstance(value, int) and 100 <= value <= 250


_ID = _table({"id": stand_in.text(64, r"[-0-9a-z_]+")}, "id")
_NAMED = _table({"name": stand_in.text(63, r"[-0-9a-z]+")}, "name")
_VOLUME = {
    "capacity": _size,
    "profile": _table(
        {"name": stand_in.one_of(("general-purpose", "5iops-tier", "10iops-tier", "sdp"))}, "name"
    ),
    "name": stand_in.text(63),
    "iops": lambda value: isinstance(value, int),
}
_BOOT = {
    "delete_volume_on_instance_delete": lambda value: value is True,
    "volume": _table(_VOLUME, "profile"),
    "name": stand_in.text(63),
}
_POLICY = {
    "host_failure": stand_in.one_of(("restart", "stop")),
    "preemption": stand_in.one_of(("delete", "stop")),
}
_INTERFACE = {"auto_delete": lambda value: value is True, "subnet": _ID, "name": stand_in.text(63)}
_FIELDS: Mapping[str, stand_in.Check] = {
    # the pattern of `InstancePrototype.name`
    "name": stand_in.text(63, r"([a-z]|[a-z][-a-z0-9]*[a-z0-9])"),
    "zone": _NAMED,
    "profile": _table({"name": stand_in.one_of(PROFILES)}, "name"),
    "image": _ID,
    "primary_network_interface": _table(
        {"subnet": _ID, "security_groups": stand_in.list_of(_ID), "name": stand_in.text(63)},
        "subnet",
    ),
    "boot_volume_attachment": _table(_BOOT, "volume"),
    "availability": _table({"class": stand_in.one_of(("standard", "spot"))}),
    "availability_policy": _table(_POLICY),
    "reservation_affinity": _table(
        {"policy": stand_in.one_of(("automatic", "disabled", "manual"))}
    ),
    "resource_group": _ID,
    "keys": stand_in.list_of(_ID),
    "user_data": stand_in.text(65_536),
    "cluster_network_attachments": stand_in.list_of(
        _table(
            {"cluster_network_interface": _table(_INTERFACE, "subnet"), "name": stand_in.text(63)}
        )
    ),
}
_CLUSTER_NETWORK: Mapping[str, stand_in.Check] = {
    "name": _FIELDS["name"],
    "profile": _table({"name": stand_in.one_of(("h100", "hopper-1"))}, "name"),
    "vpc": _ID,
    "zone": _NAMED,
    "resource_group": _ID,
}
_CLUSTER_SUBNET: Mapping[str, stand_in.Check] = {
    "name": _FIELDS["name"],
    "ip_version": stand_in.one_of(("ipv4",)),
    "total_ipv4_address_count": lambda value: (
        isinstance(value, int) and value >= 8 and value.bit_count() == 1
    ),
}
_COMMON = {"version", "generation", "start", "limit"}
_QUERIES = {  # besides the common ones
    "profiles": set[str](),
    "bare_metal_servers": {"resource_group.id", "name", "vpc.id"},
    "instances": {"resource_group.id", "name", "vpc.id", "availability.class"},
    "subnets": {"resource_group.id", "zone.name", "vpc.id"},
    "images": {"resource_group.id", "name", "status", "visibility"},
    "cluster_networks": {"resource_group.id", "name", "vpc.id", "sort"},
}


class IbmStandIn(stand_in.RestStandIn):
    """The VPC API of all regions, IAM and the Global Catalog in front of a cloud in memory."""

    # what the cloud sells, as its prices and types state it
    sells = """
    # type                 places                                   accelerators     CPUs  memory   disk  price   spot
    bx2-8x32               us-south/us-south-1,us-south/us-south-2  -                8     32GiB    -     0.384   -
    bx3d-8x40              us-south/us-south-1,us-south/us-south-2  -                8     40GiB    -     0.4968  -
    bxf-2x8                us-south/us-south-1,us-south/us-south-2  -                2     8GiB     -     0.1     0.04
    gx2-8x64x1v100         us-south/us-south-1                      1xV100/16GiB     8     64GiB    -     2.497   -
    gx3-16x80x1l4          us-south/us-south-1                      1xL4/24GiB       16    80GiB    -     1.0752  0.4301
    gx3-24x120x1l40s       us-south/us-south-1                      1xL40S/48GiB     24    120GiB   -     2.21    -
    gx3d-160x1792x8h100    us-south/us-south-1                      8xH100/80GiB     160   1792GiB  -     85      24.8965
    gx3d-208x1792x8mi300x  us-south/us-south-1                      8xMI300X/192GiB  208   1792GiB  -     40      -
    """

    root, key = "/{region}/v1", "the-api-key-of-the-crew"
    key_file = "iam_api_key: {key}\n"
    denied = CloudFault(401, "not_authenticated", "The token is missing or invalid.")
    faults: Mapping[str, CloudFault] = {
        "not-found": CloudFault(404, "not_found", "Instance not found"),
        "forbidden": CloudFault(403, "not_authorized", "the provided token is not authorized"),
        "too-many-requests": CloudFault(429, "rate_limit_exceeded", "Too many requests"),
        "internal-error": CloudFault(500, "internal_error", "Internal error"),
        "unavailable": CloudFault(503, "service_unavailable", "The service is unavailable"),
        "insufficient-capacity": CloudFault(409, "insufficient_capacity", "Insufficient capacity"),
        "quota-exceeded": CloudFault(403, "over_quota", "The quota for GPUs has been reached."),
    }
    states = stand_in.name_states(starting="starting", running="running", stopped="stopped")

    def set_up(self) -> None:
        self.settings: Mapping[str, Scalar] = {
            "iam_endpoint": f"{self.origin}/iam",
            "prices_endpoint": f"{self.origin}/catalog/api/v1",
        }
        self.bodies: dict[str, dict[str, Any]] = {}  # of creations, by machine
        self.regions: dict[str, str] = {}  # by machine
        self.reasons: dict[str, str] = {}  # codes of reasons why machines stopped, by machine
        self.subnets = [make_subnet(f"{region}-{zone}") for region in REGIONS for zone in (1, 2)]
        self.tokens: dict[str, datetime] = {}  # and when they end
        self.faulty: dict[tuple[str, str], CloudFault] = {}  # faults of lists, by region and path
        self._logins = itertools.count(1)
        self.networks: dict[str, dict[str, Any]] = {}  # cluster networks, by id
        self.network_subnets: dict[str, list[dict[str, Any]]] = {}  # theirs, by the network's id
        self.may_network = True  # whether the API key may create cluster networks

    def describe(self, fault: CloudFault) -> object:
        if fault.code.startswith("BXN"):
            return {"errorCode": fault.code, "errorMessage": fault.message, "context": {}}
        return {"errors": [{"code": fault.code, "message": fault.message}], "trace": "t-1"}

    def reply(
        self, method: str, target: str, headers: Mapping[str, str], content: bytes
    ) -> tuple[int, object] | None:
        """IAM's requests have a form instead of JSON."""
        if urlsplit(target).path.endswith("/iam/identity/token"):
            form = parse_qs(content.decode(), strict_parsing=True)
            content = json.dumps({name: values[0] for name, values in form.items()}).encode()
        return super().reply(method, target, headers, content)

    def authorize(self, request: stand_in.RestRequest) -> None:
        if request.path.split("/")[2] in ("iam", "catalog"):
            assert "authorization" not in request.headers
            return
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self.cloud.time >= self.tokens.get(token, self.cloud.time):
            raise self.denied

    def answer(self, request: stand_in.RestRequest) -> tuple[int, object]:
        match request.method, request.path.split("/")[2:]:
            case "POST", ["iam", "identity", "token"]:
                return 200, self._log_in(request)
            case "GET", ["catalog", "api", "v1", *path]:
                return 200, _read_catalog(path, request.query)
            case _, [region, "v1", *path] if region in REGIONS:
                assert request.query["version"] >= "2026-09-01"
                assert request.query["generation"] == "2"
                return self._answer(region, path, request)
        raise CloudFault(404, "not_found", request.path)

    def _answer(
        self, region: str, path: list[str], request: stand_in.RestRequest
    ) -> tuple[int, object]:
        if fault := self.faulty.get((region, "/".join(path))):
            raise fault
        match request.method, path:
            case "GET", ["instance", "profiles"]:
                shown = [show_profile(region, each) for each in PROFILES]
                return 200, self._page(region, "profiles", shown, request)
            case "GET", ["subnets"]:
                shown = [each for each in self.subnets if each["zone"]["name"][:-2] == region]
                return 200, self._page(region, "subnets", shown, request)
            case "GET", ["images"]:
                named = request.query.get("name")
                shown = [_show_image(each) for each in IMAGES if named in (None, each)]
                return 200, self._page(region, "images", shown, request)
            case "GET", ["instances"]:
                ours = [each for each in self.machines() if self._region(each.id) == region]
                shown = [*map(self._show, ours), *(self.others if region == HOME else [])]
                return 200, self._page(region, "instances", shown, request)
            case "POST", ["instances"]:
                return 201, self._create(region, request.body)
            case "GET", ["instances", instance]:
                return 200, self._show(self.machine(self._find(region, instance)))
            case "DELETE", ["instances", instance]:
                self.end(self._find(region, instance))
                return 204, None
        return self._answer_profile(region, path, request)

    def _answer_profile(
        self, region: str, path: list[str], request: stand_in.RestRequest
    ) -> tuple[int, object]:
        match request.method, path:
            case "GET", ["instance", "profiles", name] if name in PROFILES:
                return 200, show_profile(region, name)
            case "GET", ["cluster_network", "profiles", "h100" | "hopper-1" as name]:
                zones = [{"name": f"{HOME}-1"}] if region == HOME else []
                return 200, {"name": name, "family": "vpc", "zones": zones}
            case _, ["cluster_networks", *rest]:
                if not self.may_network:
                    raise self.faults["forbidden"]
                return self._answer_network(region, rest, request)
        raise CloudFault(404, "not_found", request.path)

    def _answer_network(
        self, region: str, path: list[str], request: stand_in.RestRequest
    ) -> tuple[int, object]:
        """Networks and subnets become stable one minute after their creation."""
        now, body = self.cloud.time, request.body
        ours = {id_: each for id_, each in self.networks.items() if each["region"] == region}
        made = {"created_at": now.isoformat().replace("+00:00", "Z"), "region": region}
        for each in [*ours.values(), *(each for id_ in ours for each in self.network_subnets[id_])]:
            if datetime.fromisoformat(each["created_at"]) + timedelta(minutes=1) <= now:
                each["lifecycle_state"] = each["becomes"]
        made |= {"lifecycle_state": "pending", "becomes": "stable"}
        match request.method, path:
            case "GET", []:
                named = request.query.get("name")
                shown = [each for each in ours.values() if named in (None, each["name"])]
                return 200, self._page(region, "cluster_networks", shown, request)
            case "POST", []:
                required = ("profile", "vpc", "zone")
                wrong = stand_in.wrong_field(body, _CLUSTER_NETWORK, required)
                if wrong or body["zone"] != {"name": f"{HOME}-1"} or region != HOME:
                    raise CloudFault(400, "validation_failed", f"{wrong}: {body}")
                _refuse_used(body["name"], ours.values())
                new = f"0717-network-{len(self.networks)}"
                self.network_subnets[new] = []
                return 201, self.networks.setdefault(new, {**body, **made, "id": new})
            case "GET", [network, "subnets"] if network in ours:
                return 200, {"subnets": self.network_subnets[network], "limit": 100}
            case "POST", [network, "subnets"] if network in ours:
                if wrong := stand_in.wrong_field(
                    body, _CLUSTER_SUBNET, ("total_ipv4_address_count",)
                ):
                    raise CloudFault(400, "validation_failed", f"{wrong}: {body.get(wrong)}")
                assert ours[network]["lifecycle_state"] == "stable"
                subnets = self.network_subnets[network]
                _refuse_used(body["name"], subnets)
                subnets.append({**body, **made, "id": f"{network}-subnet-{len(subnets)}"})
                return 201, subnets[-1]
            case "DELETE", [network] if network in ours:
                used = {subnet for each in self.cloud.billed() for subnet in self._attached(each)}
                if used & {each["id"] for each in self.network_subnets[network]}:
                    raise CloudFault(409, "cluster_network_in_use", "instances reside in it")
                del self.network_subnets[network]
                return 202, {**self.networks.pop(network), "lifecycle_state": "deleting"}
        raise CloudFault(404, "not_found", request.path)

    def _attached(self, machine: Any) -> list[str]:
        """The ids of the subnets of cluster networks in which an instance is."""
        told = self.bodies.get(machine.id, {}).get("cluster_network_attachments", ())
        return [each["cluster_network_interface"]["subnet"]["id"] for each in told]

    def _log_in(self, request: stand_in.RestRequest) -> dict[str, Any]:
        assert request.headers["content-type"] == "application/x-www-form-urlencoded"
        if request.body != {"grant_type": _GRANT, "apikey": self.key}:
            raise CloudFault(400, "BXNIM0415E", "Provided API key could not be found.")
        token = f"token-{next(self._logins)}"
        self.tokens[token] = self.cloud.time + timedelta(seconds=_TOKEN_S)
        return {"access_token": token, "token_type": "Bearer", "expires_in": _TOKEN_S}

    def _page(
        self, region: str, field: str, items: list[dict[str, Any]], request: stand_in.RestRequest
    ) -> dict[str, Any]:
        """A page of a list. The address of the next page lacks the version, as IBM's does."""
        assert set(request.query) <= _COMMON | _QUERIES[field], request.query
        size = int(request.query.get("limit", 50))
        assert 1 <= size <= 100
        number = int(request.query.get("start", "page-1").removeprefix("page-"))
        shown, more = self.cut(items, number, size)
        address = f"https://{region}.iaas.cloud.ibm.com/v1/{field}?limit={size}"
        told: dict[str, Any] = {"first": {"href": address}, "limit": size, field: shown}
        if more:
            told["next"] = {"href": f"{address}&start=page-{number + 1}"}
        return {**told, "total_count": len(items)}

    def _region(self, machine: str) -> str:
        return self.regions.get(machine, HOME)

    def _find(self, region: str, instance: str) -> str:
        """The id in the cloud in memory of an instance in the region."""
        machine = instance.removeprefix("0717_")
        if self._region(machine) != region:
            raise self.faults["not-found"]
        return machine

    def _create(self, region: str, body: Any) -> dict[str, Any]:
        self._check(region, body)
        return self._make(region, body, body["user_data"])

    def _make(self, region: str, body: Any, user_data: str) -> dict[str, Any]:
        """Start a machine whose request is allowed; returns its description."""
        name = body["name"]
        if any(
            each.name == name for each in self.cloud.billed() if self._region(each.id) == region
        ):
            raise CloudFault(
                400, "validation_unique_failed", f"Provided Name ({name}) is not unique"
            )
        new = self.start(name, user_data)
        self.bodies[new], self.regions[new] = body, region
        rented = next(each for each in self.cloud.machines if each.id == new)
        starting = MachineState.STARTING
        made = CloudMachine(id=new, name=name, state=starting, created_at=rented.at)
        return {**self._show(made), "status": "pending"}

    def _check(self, region: str, body: Any) -> None:
        """Raise the fault of a creation that the description does not allow."""
        required = ("image", "zone", "primary_network_interface", "profile", "name")
        if wrong := stand_in.wrong_field(body, _FIELDS, required):
            raise CloudFault(400, "validation_failed", f"{wrong}: {body.get(wrong)}")
        subnet = body["primary_network_interface"]["subnet"]["id"]
        zones = [each["zone"]["name"] for each in self.subnets if each["id"] == subnet]
        spot = body.get("availability", {}).get("class") == "spot"
        good = (
            body["zone"]["name"].startswith(f"{region}-")
            and zones == [body["zone"]["name"]]
            and body["image"]["id"] in map(image_id, IMAGES)
            and (not spot or "spot" in PROFILES[body["profile"]["name"]][5])
            and (not spot or body["reservation_affinity"] == {"policy": "disabled"})
            and ("preemption" in body["availability_policy"]) == spot
        )
        if (attached := body.get("cluster_network_attachments")) is not None:
            subnets = [each["cluster_network_interface"]["subnet"]["id"] for each in attached]
            networks = [
                id_ for id_, each in self.network_subnets.items() if subnets[0] in _ids(each)
            ]
            good = (
                good
                and body["profile"]["name"] == CLUSTERED
                and len(subnets) in (8, 16, 32)
                and len(networks) == 1
                and self.networks[networks[0]]["zone"] == body["zone"]
                and sorted(subnets) == sorted(_ids(self.network_subnets[networks[0]]))
                and all(
                    each["lifecycle_state"] == "stable"
                    for each in self.network_subnets[networks[0]]
                )
            )
        if not good:
            raise CloudFault(400, "bad_field", "a value does not fit the others")

    def _show(self, machine: CloudMachine) -> dict[str, Any]:
        assert machine.created_at is not None
        body, region = self.bodies.get(machine.id, {}), self._region(machine.id)
        reason = self.reasons.get(machine.id)
        failed = reason is not None and reason.startswith("cannot_start")
        return {
            "id": f"0717_{machine.id}",
            "crn": f"crn:v1:bluemix:public:is:{region}:a/the-secret-of-the-account::instance",
            "name": machine.name,
            "created_at": machine.created_at.isoformat().replace("+00:00", "Z"),
            "status": "failed" if failed else self.states[machine.state],
            "status_reasons": [{"code": reason, "message": "told by IBM"}] if reason else [],
            "lifecycle_state": "stable",
            "profile": {"name": body.get("profile", {}).get("name", "bx2-8x32")},
            "primary_network_interface": {
                "id": "nic",
                "primary_ip": {"address": machine.address or "0.0.0.0"},
            },
            "availability": body.get("availability", {"class": "standard"}),
            "zone": {"name": f"{region}-1"},
        }


def _ids(told: list[dict[str, Any]]) -> list[str]:
    return [each["id"] for each in told]


def _refuse_used(name: str, told: Iterable[dict[str, Any]]) -> None:
    if name in [each["name"] for each in told]:
        raise CloudFault(400, "validation_unique_failed", f"Provided Name ({name}) is not unique")


def make_subnet(zone: str, name: str = "net", status: str = "available") -> dict[str, Any]:
    return {
        "id": f"0717-{name}-{zone}",
        "name": name,
        "status": status,
        "ipv4_cidr_block": "10.240.0.0/24",
        "zone": {"name": zone},
        "vpc": {"id": "r006-vpc", "name": "crew"},
    }


def show_profile(region: str, name: str) -> dict[str, Any]:
    vcpus, memory, gpu, gpus, gpu_memory, classes, _, _ = PROFILES[name]
    allowed = classes.split()
    shown: dict[str, Any] = {
        "name": name,
        "family": "gpu" if gpu else "balanced",
        "vcpu_count": {"type": "fixed", "value": vcpus},
        "vcpu_architecture": {"type": "fixed", "value": "amd64"},
        "memory": {"type": "fixed", "value": memory},
        "bandwidth": {"type": "fixed", "value": 32000},
        "availability_class": {"type": "enum", "default": "standard", "values": allowed},
        "status": "current",
        # https://cloud.ibm.com/docs/vpc?topic=vpc-planning-cluster-network
        "cluster_network_attachment_count": {"type": "enum", "default": 0, "values": [0, 8, 16, 32]}
        if name == CLUSTERED
        else {"type": "dependent"},
        "supported_cluster_network_profiles": [
            {"name": each, "resource_type": "cluster_network_profile"}
            for each in (("h100", "hopper-1") if name == CLUSTERED else ())
        ],
        "zones": [{"name": f"{region}-1"}, *([{"name": f"{region}-2"}] if not gpu else [])],
    }
    if gpu:
        shown |= {
            "gpu_count": {"type": "fixed", "value": gpus},
            "gpu_manufacturer": {"type": "enum", "values": ["NVIDIA"]},
            "gpu_memory": {"type": "fixed", "value": gpu_memory},
            "gpu_model": {"type": "enum", "values": [gpu]},
        }
    return shown


def _show_image(name: str) -> dict[str, Any]:
    _, status, created = IMAGES[name]
    return {
        "id": image_id(name),
        "name": name,
        "status": status,
        "created_at": created,
        "visibility": "public",
    }


def _read_catalog(path: list[str], query: Mapping[str, str]) -> object:
    match path:
        case [""] if query == {"q": "kind:service is.instance"}:
            services = [("is.instance-group", "other"), ("is.instance", _SERVICE)]
            return {"resources": [{"id": id_, "name": name} for name, id_ in services]}
        case [service, "plan"] if service == _SERVICE:
            offset, size = int(query["_offset"]), min(5, int(query["_limit"]))
            plans = ["gen2-instance", *(each for each, row in PROFILES.items() if row[6])]
            shown = [{"id": f"plan-{each}", "name": each} for each in plans]
            return {"count": len(plans), "resources": shown[offset : offset + size]}
        case [plan, "pricing", "deployment"] if plan.startswith("plan-"):
            name = plan.removeprefix("plan-")
            return {"resources": [_show_prices(name, HOME, 1.0), _show_prices(name, "eu-de", 1.2)]}
    raise CloudFault(404, "not_found", "/".join(path))


def _show_prices(profile: str, region: str, factor: float) -> dict[str, Any]:
    usd, spot = (round(each * factor, 6) for each in PROFILES[profile][6:])
    metrics = {
        f"part-is.instance-hours-{profile}": usd,
        f"part-is.instance-hours-dh-{profile}": 0,
        f"part-is.spot-{profile}": spot,
    }
    return {
        "deployment_location": region,
        "deployment_region": region,
        "metrics": [
            {
                "metric_id": name,
                "charge_unit_quantity": 1,
                "amounts": [
                    {
                        "country": country,
                        "currency": currency,
                        "prices": [{"quantity_tier": 1, "price": value * rate}],
                    }
                    for country, currency, rate in (("DEU", "EUR", 0.9), ("USA", "USD", 1))
                ],
            }
            for name, value in metrics.items()
        ],
    }

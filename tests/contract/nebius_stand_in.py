"""A strict stand-in for Nebius's API over a cloud in memory: a gRPC server that reads requests with
the descriptors of Nebius's own package, refuses requests that break the rules of
https://github.com/nebius/api (read in November 2026), and returns lists in pages.

It plays the exchange of a service account's signed token, too. Its replies are checked against the
descriptors.
"""

import importlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any, NamedTuple

import pytest

from cavvy.providers.contract.rest_stand_in import RestRequest, RestStandIn, name_states
from cavvy.providers.vm.cloud import CloudFault, CloudMachine

grpc = pytest.importorskip("grpc", reason="needs the extra `nebius`")
pytest.importorskip("nebius", reason="needs the extra `nebius`")
jwt = pytest.importorskip("jwt")

PROJECT, REGION, SUBNET = "project-e00test", "eu-north1", "vpcsubnet-e00default"
CLUSTER = "computegpucluster-e00one"
# platform -> whether it has preemptible machines, and GPUs and other parts of each preset
PLATFORMS: Mapping[str, tuple[bool, Mapping[str, tuple[int, int, int]]]] = {
    "cpu-e2": (False, {"2vcpu-8gb": (0, 2, 8), "4vcpu-16gb": (0, 4, 16)}),
    "cpu-d3": (False, {"4vcpu-16gb": (0, 4, 16)}),
    "gpu-l40s-a": (False, {"1gpu-8vcpu-32gb": (1, 8, 32)}),
    "gpu-h100-sxm": (
        True,
        {"1gpu-16vcpu-200gb": (1, 16, 200), "8gpu-128vcpu-1600gb": (8, 128, 1600)},
    ),
    "gpu-next-sxm": (True, {"1gpu-16vcpu-200gb": (1, 16, 200)}),
}
# family, architecture, platforms that it does not support
IMAGES = (
    ("ubuntu22.04-cuda12", "AMD64", ()),
    ("ubuntu24.04-cuda12", "AMD64", ()),
    ("ubuntu24.04-cuda13.0", "AMD64", ("gpu-l40s-a",)),
    ("ubuntu24.04-cuda14", "ARM64", ()),
    ("ubuntu24.04-driverless", "AMD64", ()),
    ("ubuntu22.04-driverless", "AMD64", ()),
)
_METHODS = {  # method -> package, request, package, reply
    "nebius.compute.v1.InstanceService/Create": (
        "compute.CreateInstanceRequest",
        "common.Operation",
    ),
    "nebius.compute.v1.InstanceService/Delete": (
        "compute.DeleteInstanceRequest",
        "common.Operation",
    ),
    "nebius.compute.v1.InstanceService/Get": ("compute.GetInstanceRequest", "compute.Instance"),
    "nebius.compute.v1.InstanceService/List": (
        "compute.ListInstancesRequest",
        "compute.ListInstancesResponse",
    ),
    "nebius.common.v1.OperationService/List": (
        "common.ListOperationsRequest",
        "common.ListOperationsResponse",
    ),
    "nebius.compute.v1.DiskService/List": ("compute.ListDisksRequest", "compute.ListDisksResponse"),
    "nebius.compute.v1.DiskService/Delete": ("compute.DeleteDiskRequest", "common.Operation"),
    "nebius.compute.v1.ImageService/ListPublic": (
        "compute.ListPublicRequest",
        "compute.ListImagesResponse",
    ),
    "nebius.compute.v1.PlatformService/List": (
        "compute.ListPlatformsRequest",
        "compute.ListPlatformsResponse",
    ),
    "nebius.compute.v1.GpuClusterService/List": (
        "compute.ListGpuClustersRequest",
        "compute.ListGpuClustersResponse",
    ),
    "nebius.iam.v2.ProjectService/Get": ("iam.v2.GetProjectRequest", "iam.v2.Project"),
    "nebius.iam.v1.TokenExchangeService/Exchange": (
        "iam.ExchangeTokenRequest",
        "iam.CreateTokenResponse",
    ),
    "nebius.vpc.v1.SubnetService/List": ("vpc.ListSubnetsRequest", "vpc.ListSubnetsResponse"),
}
_CODES = {
    0: "UNAVAILABLE",
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "ALREADY_EXISTS",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    501: "UNIMPLEMENTED",
    503: "UNAVAILABLE",
}
_VIOLATION = {"message": "not enough", "requested": "1"}
_ERRORS: Mapping[str, Mapping[str, Any]] = {
    "quota-exceeded": {
        "quotaFailure": {"violations": [{"quota": "compute.instance.gpu.h100", **_VIOLATION}]}
    },
    "insufficient-capacity": {
        "notEnoughResources": {"violations": [{"resourceType": "gpu", **_VIOLATION}]}
    },
    "too-many-requests": {"tooManyRequests": {"violation": "compute"}},
}
_SETTINGS = {"projects": PROJECT}
_OFF = ("STARTING", "STOPPED")  # states without addresses


class CallError(NamedTuple):
    """The error of a call; `details` is a serialized `google.rpc.Status`."""

    code: str
    message: str
    details: bytes


# Answers a call: its method, its headers, and its serialized request.
AnswerCall = Callable[[str, Mapping[str, str], bytes], bytes | CallError]


def message(name: str) -> Any:
    """A message class of Nebius's package, such as "compute.Instance" or "iam.v2.Project"."""
    package, *version, kind = name.split(".")
    module = importlib.import_module(f"nebius.api.nebius.{package}.{(version or ['v1'])[0]}")
    return getattr(module, kind)


class NebiusStandIn(RestStandIn):
    """The API in front of a cloud in memory."""

    # what the cloud sells, as its prices and types state it
    sells = """
    # type                            places     accelerators  CPUs  memory   disk  price   spot
    cpu-d3_4vcpu-16gb                 eu-north1  -             4     16GiB    -     0.0992  -
    cpu-e2_2vcpu-8gb                  eu-north1  -             2     8GiB     -     0.0496  -
    cpu-e2_4vcpu-16gb                 eu-north1  -             4     16GiB    -     0.0992  -
    gpu-h100-sxm_1gpu-16vcpu-200gb    eu-north1  1xH100/80GiB  16    200GiB   -     2.95    1.25
    gpu-h100-sxm_8gpu-128vcpu-1600gb  eu-north1  8xH100/80GiB  128   1600GiB  -     23.6    10
    gpu-l40s-a_1gpu-8vcpu-32gb        eu-north1  1xL40S/48GiB  8     32GiB    -     1.5484  -
    """

    key = "ne1the-secret-of-nebius"
    settings = _SETTINGS
    states = name_states(
        starting="STARTING", running="RUNNING", stopped="STOPPED", ended="DELETING"
    )
    denied = CloudFault(401, "unauthenticated", "the token is wrong")

    def set_up(self) -> None:
        self.asked: list[Any] = []  # the bodies of requests for machines
        self.failed: dict[str, str] = {}  # codes of creations that failed, by machine
        self.loose: dict[str, str] = {}  # names of disks without an instance of Cavvy, by id
        self.shared: dict[str, str] = {}  # instances that read some of these disks, by disk
        self.subnets = {SUBNET: "default-subnet-abc"}
        self.regions = {PROJECT: REGION}  # projects; only PROJECT lists its resources
        self.accounts: dict[str, Any] = {}  # public keys of service accounts, by the key's id
        self._keys: dict[str, str] = {}  # idempotency key -> machine
        self._grpc: Any = None
        self.url = f"http://127.0.0.1:{self.serve()}"

    def serve(self) -> int:
        """Start the gRPC server; returns its port."""
        self._grpc, port = serve_calls(self.call)
        return port

    def close(self) -> None:
        self._grpc.stop(0).wait()

    def describe(self, fault: CloudFault) -> object:
        """A `google.rpc.Status`."""
        return make_status(_CODES[fault.status], fault)

    def authorize(self, request: RestRequest) -> None:
        if not request.path.endswith("TokenExchangeService/Exchange"):
            super().authorize(request)

    def call(self, method: str, headers: Mapping[str, str], data: bytes) -> bytes | CallError:
        """Answer one call."""
        from nebius.base.protos.json_format import message_to_dict, parse_dict

        method = method.removeprefix("/")
        asks, replies = _METHODS[method]
        body = message_to_dict(message(asks).FromString(data))
        reads = re.search(r"/(Get|List\w*)$", method) is not None
        told = self._reply(
            RestRequest("GET" if reads else "POST", method, method, {}, headers, body)
        )
        if isinstance(told, CloudFault):
            status = self.describe(told)
            return CallError(status["code"], told.message or told.code, pack_status(status))
        return bytes(parse_dict(told, message(replies)()).SerializeToString())

    def _reply(self, request: RestRequest) -> Any:
        with self._lock:
            try:
                self.authorize(request)
                if request.method == "GET" and self.read_faults:
                    raise self.read_faults.pop(0)
                fault, late = self.fail(request) or (None, False)
                if fault is not None and not late:
                    raise fault
                _, told = self.answer(request)
                if fault is not None:
                    raise fault
                return told
            except CloudFault as fault:
                return fault
            except Exception as bug:  # noqa: BLE001 - the test's teardown reports it
                self.bugs.append(bug)
                return CloudFault(500, "bug", repr(bug))

    def answer(self, request: RestRequest) -> tuple[int, object]:
        body = request.body
        match request.path.rpartition(".")[2]:
            case "InstanceService/List":
                self._check_project(body)
                shown = [self._show(each) for each in self.machines()]
                others = [_other(each) for each in self.others]
                return 200, self._page(body, [*shown, *others])
            case "InstanceService/Get":
                return 200, self._show(self.machine(body["id"]))
            case "InstanceService/Create":
                return 200, self._create(body, request.headers)
            case "InstanceService/Delete":
                self.end(body["id"])
                return 200, _operation(body["id"])
            case "OperationService/List":
                return 200, {"operations": self._operations(body["resourceId"])}
            case "TokenExchangeService/Exchange":
                return 200, self._exchange(body)
            case "ProjectService/Get":
                if body["id"] not in self.regions:
                    raise CloudFault(404, "not-found", "no such project")
                metadata = {"id": body["id"], "name": "default-project"}
                return 200, {"metadata": metadata, "spec": {"region": self.regions[body["id"]]}}
        return 200, self._answer_beside(request.path.rpartition(".")[2], body)

    def _answer_beside(self, call: str, body: Any) -> object:
        if call == "ImageService/ListPublic":
            assert body["region"] == REGION
            return self._page(body, [_image(*each) for each in IMAGES])
        if call == "DiskService/Delete":
            if self.loose.pop(body["id"], None) is None:
                raise CloudFault(400, "in-use", "the disk is attached")
            return _operation(body["id"])
        self._check_project(body)
        if call == "PlatformService/List":
            return self._page(body, [_platform(each) for each in PLATFORMS])
        if call == "SubnetService/List":
            return self._page(body, [{"metadata": _name(*each)} for each in self.subnets.items()])
        if call == "GpuClusterService/List":
            return self._page(body, [{"metadata": _name(CLUSTER, "one")}])
        assert call == "DiskService/List", call
        attached = [
            {
                "metadata": _name(f"disk-of-{each.id}", each.name),
                "status": {"readWriteAttachment": each.id},
            }
            for each in self.cloud.billed()
        ]
        loose = [
            {
                "metadata": _name(disk, name),
                "status": {"readOnlyAttachments": [self.shared[disk]]}
                if disk in self.shared
                else {},
            }
            for disk, name in self.loose.items()
        ]
        return self._page(body, [*attached, *loose])

    def _check_project(self, body: Any) -> None:
        if body.get("parentId") != PROJECT:
            raise CloudFault(403, "permission-denied", "no such project")

    def _page(self, body: Any, items: Sequence[Any]) -> dict[str, Any]:
        """A page; the token of the next page is its number."""
        number = int(body.get("pageToken") or "1")
        shown, more = self.cut(items, number, int(body.get("pageSize", 10)))
        return {"items": list(shown), "nextPageToken": str(number + 1) if more else ""}

    def _create(self, body: Any, headers: Mapping[str, str]) -> dict[str, Any]:
        """Start a machine. Raises the fault of a request that is not allowed."""
        key = headers["x-idempotency-key"]
        assert re.fullmatch(r"[A-Za-z0-9-]{16,}", key)
        if wrong := find_wrong(body, self.subnets):
            raise CloudFault(400, "invalid-argument", f"invalid {wrong}")
        name = body["metadata"]["name"]
        taken = name in {each.name for each in self.cloud.billed()} | set(self.loose.values())
        if taken and key not in self._keys:
            raise CloudFault(409, "already-exists", f"{name} exists")
        cloud_config = json.loads(body["spec"]["cloudInitUserData"].removeprefix("#cloud-config\n"))
        (file,) = cloud_config["write_files"]
        assert cloud_config["runcmd"] == [["/bin/sh", file["path"]]]
        new = self._keys.setdefault(key, "") or self.start(name, file["content"])
        self._keys[key] = new
        self.asked.append(body)
        return _operation(new)

    def _operations(self, machine: str) -> list[Any]:
        if machine not in self.failed:
            return [_operation(machine)]
        fault = CloudFault(429, self.failed[machine], "not enough resources")
        return [
            {
                **_operation(machine),
                "status": plain_status(make_status("RESOURCE_EXHAUSTED", fault)),
            }
        ]

    def _exchange(self, body: Any) -> dict[str, Any]:
        """The token of a service account whose signature is valid."""
        assert body["grantType"] == "urn:ietf:params:oauth:grant-type:token-exchange"
        signed = body["subjectToken"]
        key = self.accounts.get(jwt.get_unverified_header(signed)["kid"])
        if key is None:
            raise CloudFault(401, "unauthenticated", "unknown key")
        claims = jwt.decode(signed, key, algorithms=["RS256"], options={"verify_aud": False})
        assert claims["iss"] == claims["sub"]
        return {"accessToken": self.key, "tokenType": "Bearer", "expiresIn": "43200"}

    def _show(self, machine: CloudMachine) -> dict[str, Any]:
        assert machine.created_at is not None
        state = self.states[machine.state]
        number = int(machine.id.removeprefix("vm-"))
        port: dict[str, Any] = {"name": "eth0"}
        if state not in _OFF:
            port |= {
                "ipAddress": {"address": f"{machine.address}/32"},
                "publicIpAddress": {"address": f"198.51.100.{number % 250}/32"},
            }
        return {
            "metadata": {
                **_name(machine.id, machine.name),
                "createdAt": machine.created_at.strftime("%Y-%m-%dT%H:%M:%SZ"),
            },
            "spec": self.specs.get(machine.name, {}),
            "status": {"state": state, "networkInterfaces": [port]},
        }

    @property
    def specs(self) -> Mapping[str, Any]:
        """What was asked for, by the machine's name."""
        shown = ("resources", "preemptible", "recoveryPolicy")
        return {
            each["metadata"]["name"]: {
                key: each["spec"][key] for key in shown if key in each["spec"]
            }
            for each in self.asked
        }


def serve_calls(answer: AnswerCall) -> tuple[Any, int]:
    """Start a gRPC server that gives all calls to `answer`; returns it and its port."""
    server = grpc.server(ThreadPoolExecutor(4))
    server.add_generic_rpc_handlers((_Handler(answer),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    return server, port


class _Handler(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    def __init__(self, answer: AnswerCall) -> None:
        self._answer = answer

    def service(self, details: Any) -> Any:
        def reply(data: bytes, context: Any) -> bytes:
            headers = {each.key: each.value for each in context.invocation_metadata()}
            told = self._answer(details.method, headers, data)
            if isinstance(told, CallError):
                context.set_trailing_metadata((("grpc-status-details-bin", told.details),))
                context.abort(getattr(grpc.StatusCode, told.code), told.message)
            return told

        return grpc.unary_unary_rpc_method_handler(reply)


def find_wrong(body: Any, subnets: Mapping[str, str]) -> str | None:
    """The first field of a request for an instance that breaks a rule of the API's description."""
    metadata, spec = body["metadata"], body["spec"]
    (network,) = spec["networkInterfaces"]
    disk = spec["bootDisk"]["managedDisk"]
    _, presets = PLATFORMS.get(spec["resources"]["platform"], (False, {}))
    size, kind = int(disk["spec"].get("sizeGibibytes", 0)), disk["spec"].get("type")
    families = [family for family, *_ in IMAGES]
    rules = {
        "parent_id": metadata.get("parentId") == PROJECT,
        "name": re.fullmatch(r"[a-z][a-z0-9-]{0,62}", metadata["name"]) is not None,
        "preset": spec["resources"].get("preset") in presets,
        "subnet_id": network["subnetId"] in subnets,
        "interface": re.fullmatch(r"[0-9a-z][0-9a-z-]*", network["name"]) is not None,
        "ip_address": "ipAddress" in network,
        "attach_mode": spec["bootDisk"].get("attachMode") == "READ_WRITE",
        "disk name": disk["name"] == metadata["name"],
        "disk size": size >= 50 and (kind == "NETWORK_SSD" or size % 93 == 0),
        "image_family": disk["spec"]["sourceImageFamily"]["imageFamily"] in families,
        "user data": len(spec["cloudInitUserData"]) <= 32768,
        "gpu_cluster": spec.get("gpuCluster", {"id": CLUSTER})["id"] == CLUSTER,
        "recovery_policy": spec.get("recoveryPolicy") == "FAIL",
    }
    return next((name for name, holds in rules.items() if not holds), None)


def make_status(code: str, fault: CloudFault) -> dict[str, Any]:
    """An error, with the detail that Nebius adds to some."""
    return {
        "code": code,
        "message": fault.message or fault.code,
        "detail": {"service": "compute", "code": fault.code, **_ERRORS.get(fault.code, {})},
    }


def plain_status(status: Any) -> dict[str, Any]:
    """A `google.rpc.Status` in its JSON form."""
    detail = {"@type": "type.googleapis.com/nebius.common.v1.ServiceError", **status["detail"]}
    number = getattr(grpc.StatusCode, status["code"]).value[0]
    return {"code": number, "message": status["message"], "details": [detail]}


def pack_status(status: Any) -> bytes:
    from nebius.api.nebius.common.v1 import REGISTRY
    from nebius.base.protos.json_format import parse_dict

    kind = REGISTRY.message_class("google.rpc.Status")
    return bytes(parse_dict(plain_status(status), kind()).SerializeToString())


def _operation(resource: str) -> dict[str, Any]:
    at = datetime(2030, 1, 1, tzinfo=UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"id": f"computeoperation-{resource}", "resourceId": resource, "createdAt": at}


def _name(identity: str, name: str) -> dict[str, str]:
    return {"id": identity, "name": name, "parentId": PROJECT}


def _other(told: Mapping[str, Any]) -> dict[str, Any]:
    """A machine that Cavvy did not make."""
    return {"metadata": _name(str(told["id"]), str(told.get("name", "")))}


def _image(family: str, architecture: str, without: Sequence[str]) -> dict[str, Any]:
    spec = {"imageFamily": family, "cpuArchitecture": architecture}
    return {
        "metadata": _name(f"computeimage-{family}", family),
        "spec": {**spec, "unsupportedPlatforms": dict.fromkeys(without, "no driver")},
    }


def _platform(name: str) -> dict[str, Any]:
    spot, presets = PLATFORMS[name]
    shown = [
        {
            "name": preset,
            "resources": {"gpuCount": gpus, "vcpuCount": vcpus, "memoryGibibytes": memory},
        }
        for preset, (gpus, vcpus, memory) in presets.items()
    ]
    return {
        "metadata": _name(f"computeplatform-{name}", name),
        "spec": {"presets": shown},
        "status": {"allowedForPreemptibles": spot},
    }

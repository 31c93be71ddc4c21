"""A strict stand-in for Runpod's REST API 2 over a cloud in memory: an HTTP server that refuses
requests which the published description does not allow (https://api.runpod.io/v2/openapi.json, as
in the public repository of Runpod's documentation in November 2026).

The message about missing capacity and the pages of pods are those that users of the API reported,
since the description has neither.
"""

import base64
from typing import Any

from cavvy.domain.offers import Offer
from cavvy.domain.units import HourlyRate
from cavvy.providers.contract import rest_stand_in as rest
from cavvy.providers.vm.cloud import (
    CloudFault,
    CloudMachine,
    MachineRequest,
    MachineState,
    SshTarget,
)

GPUS = {  # id: GB of memory, USD an hour in both clouds, most GPUs of a pod in both clouds
    "NVIDIA A40": (48, 0.35, 0.31, 10, 0),
    "NVIDIA GeForce RTX 4090": (24, 0.69, 0.34, 6, 4),
    "NVIDIA H100 80GB HBM3": (80, 2.69, 2.59, 8, 8),
    "NVIDIA Z9000": (999, 9.99, 9.99, 8, 8),
    "AMD Instinct MI300X OAM": (192, 2.49, 2.49, 8, 0),
}
TAKEN: set[str] = set()  # GPUs that are all rented
CENTERS = {"EU-RO-1": True, "US-KS-2": True, "US-TX-3": False}  # whether with a global network
_SSH = SshTarget(address="198.51.100.7", port=10341)  # of pods without a server of their own
_OFFER = Offer(provider="any", region="here", instance_type="small", rate=HourlyRate(0))


def _count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _env(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(each, str) for each in value.values())


_GPU: dict[str, rest.Check] = {
    "id": rest.one_of(GPUS),
    "count": _count,
    "allowedCudaVersions": rest.list_of(rest.text(9, r"\d+\.\d+")),
    "minCudaVersion": rest.text(9, r"\d+\.\d+"),
    "minRamPerGpu": _count,
    "minVcpuCountPerGpu": _count,
}
_FIELDS: dict[str, rest.Check] = {
    "name": rest.text(191, r".+"),
    "image": rest.text(500, r".+"),
    "args": rest.text(10_000),
    "cloud": rest.one_of(("SECURE", "COMMUNITY")),
    "gpu": lambda value: rest.wrong_field(value, _GPU, ("id",)) is None,
    "disk": _count,
    "env": _env,
    "ports": rest.list_of(rest.text(10, r"\d+/(tcp|http)")),
    "registry": rest.text(100),
    "dataCenterIds": rest.list_of(rest.one_of(CENTERS)),
    "globalNetworking": rest.flag,
    "startSsh": rest.flag,
    "startJupyter": rest.flag,
}
_QUERY = {"include", "product", "count", "cloud", "minCudaVersion"}
_FAULTS = {
    "insufficient-capacity": CloudFault(
        400,
        "Bad Request",
        "There are no longer any instances available with the requested specifications. Please "
        "refresh and try again.",
    ),
}


class RunpodStandIn(rest.RestStandIn):
    """The API in front of a cloud in memory."""

    # what the cloud sells, as its prices and types state it
    sells = """
    # type                      places           accelerators     CPUs  memory  disk   price  spot
    1x_NVIDIA_A40               EU-RO-1,US-TX-3  1xA40/48GiB      4     16GiB   50GiB  0.35   -
    1x_NVIDIA_GeForce_RTX_4090  EU-RO-1,US-TX-3  1xRTX4090/24GiB  4     16GiB   50GiB  0.69   -
    1x_NVIDIA_H100_80GB_HBM3    EU-RO-1,US-TX-3  1xH100/80GiB     4     16GiB   50GiB  2.69   -
    2x_NVIDIA_A40               EU-RO-1,US-TX-3  2xA40/48GiB      8     32GiB   50GiB  0.7    -
    2x_NVIDIA_GeForce_RTX_4090  EU-RO-1,US-TX-3  2xRTX4090/24GiB  8     32GiB   50GiB  1.38   -
    2x_NVIDIA_H100_80GB_HBM3    EU-RO-1,US-TX-3  2xH100/80GiB     8     32GiB   50GiB  5.38   -
    4x_NVIDIA_A40               EU-RO-1,US-TX-3  4xA40/48GiB      16    64GiB   50GiB  1.4    -
    4x_NVIDIA_GeForce_RTX_4090  EU-RO-1,US-TX-3  4xRTX4090/24GiB  16    64GiB   50GiB  2.76   -
    4x_NVIDIA_H100_80GB_HBM3    EU-RO-1,US-TX-3  4xH100/80GiB     16    64GiB   50GiB  10.76  -
    8x_NVIDIA_A40               EU-RO-1,US-TX-3  8xA40/48GiB      32    128GiB  50GiB  2.8    -
    8x_NVIDIA_H100_80GB_HBM3    EU-RO-1,US-TX-3  8xH100/80GiB     32    128GiB  50GiB  21.52  -
    """

    root, key = "/v2", "rpa_TEST"
    key_file = 'apikey = "{key}"\n'
    denied = CloudFault(401, "Unauthorized", "invalid bearer token")
    faults = _FAULTS
    states = rest.name_states(
        starting="STARTING", running="RUNNING", stopped="EXITED", ended="TERMINATED"
    )

    def set_up(self) -> None:
        self.pods: dict[str, dict[str, Any]] = {}  # the bodies of requests, by pod

    def describe(self, fault: CloudFault) -> object:
        return {"title": fault.code, "status": fault.status, "detail": fault.message or fault.code}

    def answer(self, request: rest.RestRequest) -> tuple[int, object]:
        match request.method, request.path.split("/")[1:]:
            case "GET", ["catalog", "gpus"]:
                return 200, {"gpus": self._list_gpus(request)}
            case "GET", ["catalog", "datacenters"]:
                return 200, {
                    "dataCenters": [
                        {"id": name, "name": name, "region": "EUROPE", "globalNetwork": network}
                        for name, network in CENTERS.items()
                    ]
                }
            case "GET", ["pods"]:
                return 200, self._page(request)
            case "POST", ["pods"]:
                return 201, self._create(request.body)
            case "GET", ["pods", machine]:
                return 200, self._show(self.machine(machine))
            case "DELETE", ["pods", machine]:
                self.end(machine)
                return 204, None
        raise CloudFault(404, "Not Found", "resource not found")

    def _page(self, request: rest.RestRequest) -> dict[str, Any]:
        """A page of pods; the cursor of the next page is its number in base 64."""
        cursor = request.query.get("cursor", base64.b64encode(b"\xfb1").decode())
        number, size = int(base64.b64decode(cursor)[1:]), int(request.query.get("limit", 100))
        if set(request.query) - {"limit", "cursor"} or not 1 <= size <= 1000:
            raise CloudFault(422, "Unprocessable Entity", "Request validation failed.")
        pods = [self._show(each) for each in self.machines()] + self.others
        shown, more = self.cut(pods, number, size)
        following = base64.b64encode(b"\xfb%d" % (number + 1)).decode() if more else None
        return {"pods": shown, "pagination": {"nextCursor": following, "hasNextPage": more}}

    def _list_gpus(self, request: rest.RestRequest) -> list[dict[str, Any]]:
        query = request.query
        if query["include"] != "AVAILABILITY" or query["product"] != "POD" or set(query) - _QUERY:
            raise CloudFault(400, "Bad Request", "request could not be processed")
        count, cloud = int(query.get("count", 1)), query.get("cloud", "SECURE")
        return [_describe_gpu(each, count, cloud) for each in GPUS]

    def _create(self, body: Any) -> dict[str, Any]:
        """Start a pod. Raises the fault of a request that the description does not allow."""
        if wrong := rest.wrong_field(body, _FIELDS, ("name", "image", "gpu")):
            raise CloudFault(422, "Unprocessable Entity", f"{wrong} failed validation")
        wide = [each for each in body.get("dataCenterIds", []) if not CENTERS[each]]
        if body.get("globalNetworking") and (wide or body.get("cloud") == "COMMUNITY"):
            raise CloudFault(400, "Bad Request", "global networking is not available")
        key = body.get("env", {}).get("PUBLIC_KEY", "")
        request = MachineRequest(
            gang=None,  # type: ignore[arg-type]  # the cloud in memory does not read it
            offer=_OFFER,
            names=[body["name"]],
            user_data=[rest.make_start_script(key)],
            public_key=key,
        )
        (new,) = rest.finish(self.cloud.create(request))
        self.pods[new] = body
        return {"id": new, "name": body["name"], "status": "PROVISIONING"}

    def _show(self, machine: CloudMachine) -> dict[str, Any]:
        assert machine.created_at is not None
        running = machine.state is MachineState.RUNNING
        body = self.pods.get(machine.id, {})
        ssh = machine.ssh or _SSH
        direct = {
            "host": ssh.address,
            "port": ssh.port,
            "username": ssh.user,
            "command": f"ssh {ssh.user}@{ssh.address} -p {ssh.port}",
        }
        address = self.cloud.addresses.get(machine.id, "10.65.1.42")
        network = {"enabled": True, "ip": address, "internalDns": "x.runpod.internal"}
        return {
            "id": machine.id,
            "name": machine.name,
            "status": self.states[machine.state],
            "ssh": {"proxy": None, "direct": direct if running else None},
            "cost": 0.35,
            "globalNetworking": network if body.get("globalNetworking") else {"enabled": False},
            "createdAt": machine.created_at.isoformat(timespec="seconds"),
            "startedAt": None,
        }


def _describe_gpu(gpu: str, count: int, cloud: str) -> dict[str, Any]:
    memory, secure, community, most_secure, most_community = GPUS[gpu]
    most = most_secure if cloud == "SECURE" else most_community
    told = {
        "id": gpu,
        "name": gpu.removeprefix("NVIDIA "),
        "pool": None,
        "manufacturer": gpu.split()[0],
        "memory": memory,
        "secure": most_secure > 0,
        "community": most_community > 0,
        "price": {"secure": secure, "community": community},
        "maxCount": {"secure": most_secure, "community": most_community},
        "availability": "LOW" if count <= most and gpu not in TAKEN else "NONE",
    }
    if cloud == "SECURE" and count <= most:
        centers = [("EU-RO-1", "HIGH"), ("US-TX-3", "LOW"), ("US-KS-2", "NONE")]
        told["dataCenters"] = [
            {"id": name, "name": name, "availability": level} for name, level in centers
        ]
    return told

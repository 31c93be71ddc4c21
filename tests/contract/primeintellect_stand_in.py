"""A strict stand-in for Prime Intellect's API 1 over a cloud in memory: an HTTP server that refuses
requests which the published description (https://docs.primeintellect.ai/api-reference, read in
November 2026) does not allow, and returns lists in pages.

The description does not contain the errors for missing capacity and for prices above `maxPrice`,
and the limits of names; these are assumptions.
"""

from typing import Any

from cavvy.providers.contract.rest_stand_in import (
    RestRequest,
    RestStandIn,
    flag,
    name_states,
    one_of,
    text,
    wrong_field,
)
from cavvy.providers.vm.cloud import CloudFault, CloudMachine

IMAGES = ("ubuntu_22_cuda_12", "cuda_12_1_pytorch_2_2")
_FIXED = {"minCount": None, "maxCount": None, "pricePerUnit": None, "defaultIncludedInPrice": None}


def _resource(count: int, **values: object) -> dict[str, object]:
    return {**_FIXED, "step": None, "additionalInfo": None, "defaultCount": count, **values}


def _offer(cloud: str, name: str, gpu: str, gpus: int, usd: float, **values: Any) -> dict[str, Any]:
    """A configuration, with the fields of the documented example."""
    return {
        "cloudId": name,
        "gpuType": gpu,
        "socket": "PCIe",
        "provider": cloud,
        "dataCenter": "CANADA-1",
        "country": "CA",
        "gpuCount": gpus,
        "gpuMemory": 80,
        "disk": _resource(100),
        "vcpu": _resource(180),
        "memory": _resource(180),
        "internetSpeed": None,
        "interconnect": None,
        "interconnectType": None,
        "provisioningTime": None,
        "stockStatus": "Available",
        "security": "secure_cloud",
        "prices": {
            "onDemand": usd,
            "communityPrice": None,
            "isVariable": None,
            "currency": "USD",
        },
        "images": list(IMAGES),
        "isSpot": None,
        "prepaidTime": None,
        **values,
    }


# The first is the documented example of a request, the second that of a reply.
OFFERS = [
    _offer("hyperstack", "n3-H100x1", "H100_80GB", 1, 1.9),
    _offer(
        "runpod",
        "NVIDIA H100 PCIe",
        "H100_80GB",
        1,
        2.69,
        dataCenter="US-KS-2",
        country="US",
        disk=_resource(80, pricePerUnit=0.00014, defaultIncludedInPrice=False),
    ),
    _offer("hyperstack", "n3-H100x1", "H100_80GB", 1, 2.5),
    _offer("hyperstack", "n3-H100x8", "H100_80GB", 8, 15.2),
    _offer("datacrunch", "1A100.SPOT", "A100_80GB", 1, 0.6, isSpot=True),
    _offer("latitude", "g3.next", "Z9000_999GB", 1, 9.9, gpuMemory=999),
    _offer("hyperstack", "n3-L40x1", "L40_48GB", 1, 1, gpuMemory=48, stockStatus="Unavailable"),
    _offer("akash", "a100", "A100_80GB", 1, 0.8, security="community_cloud", dataCenter=None),
    _offer("cudocompute", "cpu", "CPU_NODE", 0, 0.1, gpuMemory=0),
]
_POD = {
    "name": text(63, r"[A-Za-z0-9-]*[A-Za-z][A-Za-z0-9-]*"),
    "cloudId": one_of({each["cloudId"] for each in OFFERS}),
    "gpuType": one_of({each["gpuType"] for each in OFFERS}),
    "socket": one_of(("PCIe", "SXM2", "SXM3", "SXM4", "SXM5")),
    "gpuCount": lambda value: type(value) is int and value > 0,
    "diskSize": lambda value: type(value) is int and value > 0,
    "vcpus": lambda value: type(value) is int and value > 0,
    "memory": lambda value: type(value) is int and value > 0,
    "image": one_of(IMAGES),
    "dataCenterId": text(100),
    "country": text(2),
    "security": one_of(("secure_cloud", "community_cloud")),
    "sshKeyId": text(36),
    "maxPrice": lambda value: type(value) in (int, float) and value > 0,
    "autoRestart": flag,
}
_REQUIRED = ("cloudId", "gpuType", "socket", "gpuCount")
_TEAM = {"teamId": text(36)}
_BODY = {
    "pod": lambda value: wrong_field(value, _POD, _REQUIRED) is None,
    "provider": lambda value: set(value) == {"type"} and value["type"] in _CLOUDS,
    "team": lambda value: wrong_field(value, _TEAM, _TEAM) is None,
}
_CLOUDS = {each["provider"] for each in OFFERS}
_KEY = {"name": text(100), "publicKey": text(8192, r"ssh-\S+ \S+.*")}
_FAULTS = {"insufficient-capacity": CloudFault(400, "error", "The machine is out of stock")}


class PrimeIntellectStandIn(RestStandIn):
    """The API in front of a cloud in memory."""

    # what the cloud sells, as its prices and types state it
    sells = """
    # type                   places    accelerators  CPUs  memory  disk    price   spot
    hyperstack.n3-H100x1     CANADA-1  1xH100/80GiB  180   180GiB  100GiB  1.9     -
    hyperstack.n3-H100x8     CANADA-1  8xH100/80GiB  180   180GiB  100GiB  15.2    -
    runpod.NVIDIA_H100_PCIe  US-KS-2   1xH100/80GiB  180   180GiB  80GiB   2.7012  -
    """
    unknown = "Z9000_999GB"

    root, key = "/api/v1", "pit_TEST"
    key_file = '{{\n  "api_key": "{key}",\n  "team_id": null\n}}\n'
    denied = CloudFault(401, "error", "Authorization failed")
    faults = _FAULTS
    states = name_states(
        starting="PROVISIONING", running="ACTIVE", stopped="STOPPED", ended="TERMINATED"
    )

    def set_up(self) -> None:
        self.keys = [{"id": "key-0", "name": "laptop", "publicKey": "ssh-rsa AAAA me"}]
        self.asked: list[dict[str, Any]] = []  # the bodies of requests for pods
        self.available = OFFERS

    def describe(self, fault: CloudFault) -> object:
        return {"detail": fault.message or fault.code}

    def answer(self, request: RestRequest) -> tuple[int, object]:
        match request.method, request.path.split("/")[1:]:
            case "GET", ["availability", "gpus"]:
                return 200, self._list_available(request.query)
            case "GET", ["ssh_keys", ""]:
                return 200, self._page(self.keys, request.query)
            case "POST", ["ssh_keys", ""]:
                if wrong := wrong_field(request.body, _KEY, _KEY):
                    raise CloudFault(422, "error", f"{wrong} is invalid")
                self.keys.append({"id": f"key-{len(self.keys)}", **request.body})
                return 200, self.keys[-1]
            case "GET", ["pods", ""]:
                shown = [self._show(each) for each in self.machines()]
                return 200, self._page(shown + self.others, request.query)
            case "POST", ["pods", ""]:
                return 200, {"id": self._create(request.body), "status": "PROVISIONING"}
            case "GET", ["pods", machine]:
                return 200, self._show(self.machine(machine))
            case "DELETE", ["pods", machine]:
                self.end(machine)
                return 200, {"status": "success"}
        raise CloudFault(404, "error", request.path)

    def _page(self, items: list[dict[str, Any]], query: Any) -> dict[str, Any]:
        offset, limit = int(query["offset"]), min(self.page, int(query["limit"]))
        if int(query["limit"]) > 100 or set(query) - {"offset", "limit"}:
            raise CloudFault(422, "error", "the page is invalid")
        data = items[offset : offset + limit]
        return {"total_count": len(items), "offset": offset, "limit": limit, "data": data}

    def _list_available(self, query: Any) -> dict[str, Any]:
        size = int(query["page_size"])
        if size > 100 or set(query) - {"page", "page_size"}:
            raise CloudFault(422, "error", "the page is invalid")
        items, _ = self.cut(self.available, int(query["page"]), size)
        return {"items": list(items), "totalCount": len(self.available)}

    def _create(self, body: Any) -> str:
        """Start a pod. Raises the fault of a request that the description does not allow."""
        if wrong := wrong_field(body, _BODY, ("pod", "provider")):
            raise CloudFault(422, "error", f"{wrong} is invalid")
        pod = body["pod"]
        fields = {"cloudId": "cloudId", "gpuType": "gpuType", "gpuCount": "gpuCount"}
        fields |= {"socket": "socket", "dataCenterId": "dataCenter", "security": "security"}
        usd = [
            each["prices"]["onDemand"]
            for each in self.available
            if all(pod.get(name) == each[field] for name, field in fields.items())
            and each["provider"] == body["provider"]["type"]
        ]
        if not usd:
            raise CloudFault(422, "error", "there is no such configuration")
        if min(usd) > pod["maxPrice"]:
            raise CloudFault(400, "error", "nothing is available at this price")
        keys = {each["id"]: each["publicKey"] for each in self.keys}
        if pod["sshKeyId"] not in keys:
            raise CloudFault(422, "error", "there is no such SSH key")
        key = keys[pod["sshKeyId"]]
        new = self.start(pod["name"], f"#!/bin/sh\n{key}", public_key=key)
        self.asked.append(body)
        return new

    def _show(self, machine: CloudMachine) -> dict[str, Any]:
        assert machine.created_at is not None
        ended = machine.ended_at and machine.ended_at.strftime("%Y-%m-%dT%H:%M:%SZ")
        return {
            "id": machine.id,
            "name": machine.name,
            "providerType": "hyperstack",
            "gpuName": "H100_80GB",
            "gpuCount": 1,
            "priceHr": 1.9,
            "type": "HOSTED",
            "status": self.states[machine.state],
            "installationStatus": "FINISHED",
            "installationFailure": None,
            "createdAt": machine.created_at.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "terminatedAt": ended,
            "sshConnection": "ubuntu@198.51.100.7 -p 1234" if machine.address else [None],
            "ip": "198.51.100.7" if machine.address else [None],
            "isSpot": False,
        }

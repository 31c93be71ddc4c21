"""A strict stand-in for Hyperstack's API 1 over a cloud in memory: an HTTP server that refuses
requests which the published description (https://docs.hyperstack.cloud/docs/api-reference and the
models of the package `hyperstack` 1.56.1a0, November 2026) does not allow, and returns lists in
pages.

The description does not list the messages of errors; those about stock and quotas are made up. The
names of spot flavors and of their GPUs (`n3-RTX-A6000x1-spot`, `RTX-A6000-spot`) are those that
users of the API show.
"""

from typing import Any

from cavvy.providers.contract.rest_stand_in import (
    RestRequest,
    RestStandIn,
    flag,
    id_of,
    list_of,
    name_states,
    number_of,
    one_of,
    text,
    wrong_field,
)
from cavvy.providers.vm.cloud import CloudFault, CloudMachine

FLAVORS = {  # name: region, cores, GB of memory, GB of disk, GPU, GPUs, in stock
    "n1-cpu-small": ("NORWAY-1", 4, 4, 100, "", 0, True),
    "n1-RTX-A4000x1": ("NORWAY-1", 6, 24.0, 100, "RTX-A4000", 1, True),
    "n3-H100x8-NVLink": ("CANADA-1", 252, 1440.0, 100, "H100-80G-PCIe-NVLink", 8, True),
    "n3-L40x1": ("CANADA-1", 28, 58.0, 100, "L40", 1, False),
    "n3-A100x1": ("US-1", 28, 120.0, 100, "A100-80G-PCIe", 1, True),  # has no environment
    "n3-RTX-A6000x1-spot": ("CANADA-1", 28, 58.0, 100, "RTX-A6000-spot", 1, True),
    "n3-Z9000x1": ("CANADA-1", 28, 58.0, 100, "Z9000-999G", 1, True),
    "n3-H200x8": ("CANADA-1", 28, 58.0, 100, "H200-141G-SXM5", 8, True),  # has no price
}
PRICES = {"RTX-A4000": 0.15, "H100-80G-PCIe-NVLink": 1.95, "L40": 1.0, "A100-80G-PCIe": 1.35}
PRICES |= {
    "RTX-A6000": 0.5,
    "RTX-A6000-spot": 0.4,
    "Z9000-999G": 9.99,
    "vCPU (cpu-only-flavors)": 0.009,
}
ENVIRONMENTS = {"bare": "CANADA-1", "default-CANADA-1": "CANADA-1", "default-NORWAY-1": "NORWAY-1"}
IMAGES = (
    "Ubuntu Server 22.04 LTS R535 CUDA 12.2",
    "Ubuntu Server 24.04 LTS R570 CUDA 12.8",
    "Ubuntu Server 24.04 LTS R570 CUDA 12.8 with Docker",
    "Ubuntu Server 24.04 LTS",
    "Windows Server 2022 Standard",
)
_KEYS = (("laptop", "default-CANADA-1"), ("desktop", "default-NORWAY-1"))
_FIELDS = {
    "name": text(50),
    "environment_name": one_of(ENVIRONMENTS),
    "key_name": one_of([name for name, _ in _KEYS]),
    "flavor_name": one_of(FLAVORS),
    "image_name": one_of(IMAGES),
    "count": lambda count: isinstance(count, int) and 1 <= count <= 20,
    "assign_floating_ip": flag,
    "create_bootable_volume": flag,
    "enable_port_randomization": flag,
    "labels": list_of(text(100)),
    "user_data": text(65536),
}
_REQUIRED = ("count", "environment_name", "flavor_name", "key_name", "name")
_FAULTS = {
    "insufficient-capacity": CloudFault(400, "bad_request", "The flavor is out of stock."),
    "quota-exceeded": CloudFault(400, "bad_request", "The quota of the account is exceeded."),
    "forbidden": CloudFault(403, "forbidden", "Forbidden."),
    "not-found": CloudFault(404, "not_found", "The virtual machine does not exist."),
}


class HyperstackStandIn(RestStandIn):
    """The API in front of a cloud in memory."""

    # what the cloud sells, as its prices and types state it
    sells = """
    # type               places    accelerators       CPUs  memory   disk    price  spot
    n3-H100x8-NVLink     CANADA-1  8xH100-PCIe/80GiB  252   1440GiB  100GiB  15.6   -
    n3-RTX-A6000x1-spot  CANADA-1  1xA6000/48GiB      28    58GiB    100GiB  -      0.4
    n1-RTX-A4000x1       NORWAY-1  1xA4000/16GiB      6     24GiB    100GiB  0.15   -
    """
    unknown = "Z9000-999G"

    root, key = "/v1", "f1e2d3c4-test"
    key_file = "api_key: {key}\n"
    denied = CloudFault(401, "unauthorized", "Unauthorized.")
    faults = _FAULTS
    states = name_states(starting="BUILD", running="ACTIVE", stopped="SHUTOFF", ended="DELETING")

    def set_up(self) -> None:
        self.keys: Any = _KEYS
        self.requests: list[dict[str, Any]] = []  # bodies of requests for machines

    def describe(self, fault: CloudFault) -> object:
        return {"status": False, "message": fault.message, "error_reason": fault.code}

    def authorize(self, request: RestRequest) -> None:
        if request.headers.get("api_key") != self.key or "authorization" in request.headers:
            raise self.denied

    def answer(self, request: RestRequest) -> tuple[int, object]:
        match request.method, request.path.split("/")[1:]:
            case "GET", ["pricebook"]:
                return 200, [
                    {"id": number, "name": name, "value": value, "original_value": value}
                    for number, (name, value) in enumerate(PRICES.items())
                ]
            case "GET", ["core", "flavors"]:
                return 200, _said(data=[_flavors(each) for each in FLAVORS])
            case "GET", ["core", "images"] if request.query.get("region"):
                return 200, _said(images=[_images(request.query["region"])])
            case "GET", ["core", "environments"]:
                environments = [
                    {"id": number, "name": name, "region": region}
                    for number, (name, region) in enumerate(ENVIRONMENTS.items())
                ]
                return 200, self._page("environments", environments, request)
            case "GET", ["core", "keypairs"]:
                pairs = [
                    {"name": name, "environment": {"name": where, "region": ENVIRONMENTS[where]}}
                    for name, where in self.keys
                ]
                return 200, self._page("keypairs", pairs, request)
            case "GET", ["core", "virtual-machines"]:
                shown = [self._show(each) for each in self.machines()] + self.others
                return 200, self._page("instances", shown, request)
            case "POST", ["core", "virtual-machines"]:
                return 200, _said(instances=[{"id": self._create(request.body)}])
            case "GET", ["core", "virtual-machines", number]:
                return 200, _said(instance=self._show(self.machine(id_of(number))))
            case "DELETE", ["core", "virtual-machines", number]:
                self.end(id_of(number))
                return 200, _said()
        raise CloudFault(404, "not_found", request.path)

    def _page(
        self, field: str, items: list[dict[str, Any]], request: RestRequest
    ) -> dict[str, Any]:
        number, size = int(request.query.get("page", 1)), int(request.query.get("pageSize", 10))
        shown, _ = self.cut(items, number, size)
        said = {field: shown, "count": len(items), "page": number}
        return _said(**said, page_size=min(size, self.page))

    def _create(self, body: Any) -> int:
        """Start a machine. Raises the fault of a request that the description does not allow."""
        wrong = wrong_field(body, _FIELDS, _REQUIRED)
        if not wrong and (body["key_name"], body["environment_name"]) not in self.keys:
            wrong = "key_name"
        if not wrong and FLAVORS[body["flavor_name"]][0] != ENVIRONMENTS[body["environment_name"]]:
            wrong = "flavor_name"
        if wrong:
            raise CloudFault(400, "bad_request", f"{wrong} is invalid")
        self.requests.append(body)
        return number_of(self.start(body["name"], body.get("user_data", "")))

    def _show(self, machine: CloudMachine) -> dict[str, Any]:
        assert machine.created_at is not None
        return {
            "id": number_of(machine.id),
            "name": machine.name,
            "status": self.states[machine.state],
            "vm_state": "active",
            "power_state": "RUNNING",
            "environment": {"id": 1, "name": "default-CANADA-1", "region": "CANADA-1"},
            "fixed_ip": machine.address,
            "floating_ip": None,
            "created_at": machine.created_at.strftime("%Y-%m-%dT%H:%M:%S"),
        }


def _said(**fields: Any) -> dict[str, Any]:
    return {"status": True, "message": "Success", **fields}


def _flavors(name: str) -> dict[str, Any]:
    region, cores, memory, disk, gpu, gpus, stock = FLAVORS[name]
    flavor = {
        "id": 1,
        "name": name,
        "region_name": region,
        "cpu": cores,
        "ram": memory,
        "disk": disk,
        "ephemeral": 0,
        "gpu": gpu,
        "gpu_count": gpus,
        "stock_available": stock,
    }
    return {"gpu": gpu, "region_name": region, "flavors": [flavor]}


def _images(region: str) -> dict[str, Any]:
    images = [{"id": 1, "name": name, "region_name": region} for name in IMAGES]
    return {"region_name": region, "type": "all", "images": images}

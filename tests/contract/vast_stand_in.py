"""A strict stand-in for Vast.ai's REST API over a cloud in memory: an HTTP server that refuses
requests which the published description does not allow
(https://docs.vast.ai/api-reference/openapi/yaml: `search_offers.yaml`, `create_instance.yaml`,
`show_instances.yaml` and the generated files of single instances, as in the public repository of
Vast.ai's documentation in November 2026).

A search needs no key (`auto_get_api_v0_bundles`). A computer that has been rented is no longer
offered, and a request for it gets the status 404 or 410, as described. Computers that cost the same
take its place.
"""

import base64
import json
from typing import Any

from cavvy.domain.offers import Offer
from cavvy.domain.units import HourlyRate
from cavvy.providers.contract.rest_stand_in import (
    Check,
    RestRequest,
    RestStandIn,
    finish,
    flag,
    id_of,
    name_states,
    number_of,
    one_of,
    text,
    wrong_field,
)
from cavvy.providers.vm.cloud import (
    CloudFault,
    CloudMachine,
    MachineRequest,
    MachineState,
    SshTarget,
)

# Vast.ai's documented example of an offer (search_offers.yaml, November 2026), without fields that
# say nothing about the computer.
EXAMPLE = {
    "id": 12345678,
    "ask_contract_id": 12345678,
    "cpu_arch": "amd64",
    "cpu_cores": 64,
    "cpu_cores_effective": 32,
    "cpu_ram": 65536,
    "cuda_max_good": 11.2,
    "direct_port_count": 42,
    "disk_space": 2048.5,
    "dph_base": 0.123456,
    "dph_total": 0.234567,
    "geolocation": "Atlantis, AT",
    "gpu_arch": "nvidia",
    "gpu_frac": 0.75,
    "gpu_name": "Imaginary RTX 9999",
    "gpu_ram": 24576,
    "gpu_total_ram": 49152,
    "is_bid": False,
    "machine_id": 88888,
    "min_bid": 0.111111,
    "num_gpus": 4,
    "rentable": True,
    "rented": False,
    "storage_cost": 0.987654,
    "storage_total_cost": 0.123456,
    "verification": "verified",
}
ASKS: tuple[dict[str, Any], ...] = (
    {"id": 1000, "gpu_name": "RTX 4090", "gpu_ram": 24564, "num_gpus": 1, "dph_base": 0.4},
    {"id": 2000, "gpu_name": "RTX 4090", "gpu_ram": 24564, "num_gpus": 1, "dph_base": 0.45},
    {"id": 3000, "gpu_name": "A100 PCIE", "gpu_ram": 81920, "num_gpus": 2, "dph_base": 2.0},
    {"id": 4000, "gpu_name": "A100 PCIE", "gpu_ram": 40960, "num_gpus": 2, "dph_base": 1.0},
    {"id": 5000, "gpu_name": "RTX 4090", "gpu_ram": 24564, "num_gpus": 1, "dph_base": 0.3}
    | {"datacenter": False, "geolocation": "Sweden, SE"},
    {"id": 6000, "gpu_name": "L4", "gpu_ram": 23034, "num_gpus": 1, "geolocation": None},
    {"id": 7000, "gpu_name": "L4", "gpu_ram": 23034, "num_gpus": 1, "cpu_cores_effective": 2},
    {"id": 12345678},
)
_MACHINE = {"geolocation": "Texas, US", "gpu_frac": 1.0, "cuda_max_good": 12.8, "datacenter": True}
_OFFER = Offer(provider="any", region="here", instance_type="small", rate=HourlyRate(0))
_SSH = SshTarget(address="192.0.2.45", port=20000)  # of instances without a server of their own
_OPERATORS = {
    "eq": lambda found, wanted: found == wanted,
    "gte": lambda found, wanted: found >= wanted,
    "lte": lambda found, wanted: found <= wanted,
    "in": lambda found, wanted: found in wanted,
}
# fields of a search that have an operator, of which Cavvy uses some
_FILTERS = {
    "verified": bool,
    "rentable": bool,
    "datacenter": bool,
    "gpu_arch": str,
    "gpu_name": str,
    "geolocation": list,
    "num_gpus": int,
    "direct_port_count": int,
    "disk_space": int,
    "cuda_max_good": float,
}


def _number(low: float, high: float = 1e9) -> Check:
    return lambda value: (
        isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
    )


_FIELDS: dict[str, Check] = {
    "image": text(1024, r".+"),
    "label": text(256),
    "disk": _number(8),
    "runtype": one_of(("ssh", "jupyter", "args", "ssh_proxy", "ssh_direct", "jupyter_direct")),
    "target_state": one_of(("running", "stopped")),
    "price": _number(0.001, 128.0),
    "cancel_unavail": flag,
    "onstart": text(4048),
}
_FAULTS = {
    "insufficient-capacity": CloudFault(
        410, "no_such_ask", "error 410/3907: no_such_ask Instance type 1000 is no longer available."
    ),
    "not-found": CloudFault(404, "no_such_instance", "Instance with that ID does not exist."),
}


class VastStandIn(RestStandIn):
    """The API in front of a cloud in memory."""

    # what the cloud sells, as its prices and types state it
    sells = """
    # type             places  accelerators     CPUs  memory  disk   price  spot
    1x_RTX_4090_24GB   US      1xRTX4090/24GiB  32    64GiB   50GiB  0.45   0.1723
    2x_A100_PCIE_40GB  US      2xA100/40GiB     32    64GiB   50GiB  1.05   0.1723
    2x_A100_PCIE_80GB  US      2xA100/80GiB     32    64GiB   50GiB  2.05   0.1723
    """

    root, key = "/api", "vast-test-key"
    denied = CloudFault(401, "auth_error", "Invalid user key")
    faults, states = _FAULTS, name_states(starting="loading", running="running", stopped="stopped")

    def set_up(self) -> None:
        self.bodies: dict[str, dict[str, Any]] = {}  # of requests, by machine
        self.rented: dict[str, int] = {}  # asks, by machine
        self.asks = [{**EXAMPLE, **_MACHINE, **each} for each in ASKS]
        self.searches: list[dict[str, Any]] = []

    def authorize(self, request: RestRequest) -> None:
        if request.path != "/v0/bundles/":
            super().authorize(request)

    def describe(self, fault: CloudFault) -> object:
        return {"success": False, "error": fault.code, "msg": fault.message}

    def answer(self, request: RestRequest) -> tuple[int, object]:
        match request.method, request.path.split("/")[1:]:
            case "GET", ["v0", "bundles", ""]:
                return 200, {"offers": self._search(request)}
            case "PUT", ["v0", "asks", ask, ""]:
                return 200, {"success": True, "new_contract": self._create(int(ask), request.body)}
            case "GET", ["v1", "instances", ""]:
                return 200, self._page(request)
            case "GET", ["v0", "instances", number, ""]:
                return 200, {"instances": self._find(number)}
            case "DELETE", ["v0", "instances", number, ""]:
                self.end(id_of(number))
                return 200, {"success": True, "msg": "Instance destroyed successfully"}
        raise CloudFault(404, "not_found", "no such address")

    def _search(self, request: RestRequest) -> list[dict[str, Any]]:
        """The computers that match. Raises the fault of a search that is not allowed."""
        if set(request.query) != {"q"}:
            raise CloudFault(400, "bad_request", "Invalid query: must be dict of conditions")
        query = json.loads(request.query["q"])
        self.searches.append(dict(query))
        kind, limit = query.pop("type"), query.pop("limit")
        ((field, direction),), disk = query.pop("order"), query.pop("allocated_storage")
        if kind not in ("ondemand", "bid") or direction not in ("asc", "desc") or limit < 1:
            raise CloudFault(400, "bad_request", "invalid search")
        found = [self._price(each, kind, disk) for each in self.asks]
        found = [each for each in found if all(_match(each, *one) for one in query.items())]
        return sorted(found, key=lambda each: each[field], reverse=direction == "desc")[:limit]

    def _price(self, ask: dict[str, Any], kind: str, disk: float) -> dict[str, Any]:
        """The price with a disk of this size, as in the example: 0.1 cent for each GB."""
        compute = ask["min_bid"] if kind == "bid" else ask["dph_base"]
        storage = disk * 0.001
        return ask | {"storage_total_cost": storage, "dph_total": compute + storage}

    def _create(self, number: int, body: Any) -> int:
        """Rent a computer. Raises the fault of a request that is not allowed."""
        if wrong := wrong_field(body, _FIELDS, ("image",)):
            raise CloudFault(400, "invalid_args", f"error 400/3467: Invalid args: {wrong}")
        ask = next((each for each in self.asks if each["id"] == number), None)
        if ask is None:
            message = f"error 404/3603: no_such_ask Instance type by id {number} is not available."
            raise CloudFault(404, "invalid_args", message)
        if "price" in body and body["price"] < ask["min_bid"]:
            raise CloudFault(400, "invalid_price", "the bid is too low")
        key = next(line for line in body["onstart"].split("'") if line.startswith("ssh-ed25519"))
        request = MachineRequest(
            gang=None,  # type: ignore[arg-type]  # the cloud in memory does not read it
            offer=_OFFER,
            names=[body["label"]],
            user_data=[body["onstart"]],
            public_key=key,
        )
        try:
            (new,) = finish(self.cloud.create(request))
        finally:
            if self.cloud.machines and self.cloud.machines[-1].name == body["label"]:
                self._take(ask, body)
        return number_of(new)

    def _take(self, ask: dict[str, Any], body: dict[str, Any]) -> None:
        """Replace the rented computer with another, and note the request."""
        newest = self.cloud.machines[-1].id
        self.bodies[newest], self.rented[newest] = body, ask["id"]
        self.asks[self.asks.index(ask)] = ask | {"id": ask["id"] + 1}

    def _page(self, request: RestRequest) -> dict[str, Any]:
        token = request.query.get("after_token", base64.b64encode(b"\xfb1").decode())
        number, size = int(base64.b64decode(token)[1:]), int(request.query.get("limit", 5))
        if set(request.query) - {"limit", "after_token"} or not 1 <= size <= 25:
            raise CloudFault(400, "invalid_request", "Error in query parameters")
        instances = [self._show(each) for each in self.machines()] + self.others
        shown, more = self.cut(instances, number, size)
        following = base64.b64encode(b"\xfb%d" % (number + 1)).decode() if more else None
        return {
            "success": True,
            "instances_found": len(shown),
            "total_instances": len(instances),
            "next_token": following,
            "instances": shown,
        }

    def _find(self, number: str) -> dict[str, Any] | None:
        if not number.isdecimal():
            raise CloudFault(400, "invalid_args", "invalid id")
        try:
            return self._show(self.machine(id_of(number)))
        except CloudFault:
            return None

    def _show(self, machine: CloudMachine) -> dict[str, Any]:
        assert machine.created_at is not None
        running = machine.state is MachineState.RUNNING
        ssh = machine.ssh or _SSH
        ports = {"22/tcp": [{"HostIp": "0.0.0.0", "HostPort": str(ssh.port)}]}
        return {
            "id": number_of(machine.id),
            "label": machine.name,
            "actual_status": self.states[machine.state],
            "intended_status": "running",
            "is_bid": "price" in self.bodies.get(machine.id, {}),
            "public_ipaddr": ssh.address,
            "ports": ports if running else None,
            "ssh_host": "ssh123.vast.ai",
            "ssh_port": 10600,
            "start_date": machine.created_at.timestamp(),
        }


def _match(ask: dict[str, Any], field: str, condition: dict[str, Any]) -> bool:
    """Whether a computer meets a condition. Raises the fault of an unknown one."""
    ((operator, wanted),) = condition.items()
    kind = _FILTERS.get(field)
    if kind is None or operator not in _OPERATORS or not isinstance(wanted, kind):
        raise CloudFault(400, "bad_request", f"{field} is not a valid search key")
    found = ask.get(field)
    if field == "verified":
        found = ask["verification"] == "verified"
    elif field == "geolocation":  # conditions name the country
        found = str(found).rpartition(", ")[2]
    return _OPERATORS[operator](found, wanted)

"""A stand-in for the API of the made-up cloud in `zoned_provider`."""

from collections.abc import Sequence
from typing import Any

from cavvy.providers.contract.rest_stand_in import (
    RestRequest,
    RestStandIn,
    WithHeaders,
    name_states,
    one_of,
    text,
    wrong_field,
)
from cavvy.providers.vm.cloud import CloudFault, CloudMachine

PRODUCTS = {  # name: GPU, GPUs, GB of each, EUR a month, CPUs, bytes of memory, zones
    "DEV": (None, 0, 0, 14.60, 3, 4 * 2**30, ("east-1", "east-2", "west-1")),
    "L4-2": ("NVIDIA L4", 2, 24, 1095.00, 16, 96 * 2**30, ("east-1", "west-1")),
    "H100-8": ("NVIDIA H100", 8, 80, 16060.00, 192, 1920 * 2**30, ("east-2",)),
    "NEXT": ("NVIDIA Z9000", 1, 999, 9.99, 16, 2**37, ("east-2",)),
}


class SteppeStandIn(RestStandIn):
    """The API in front of a cloud in memory."""

    root = "/v1"
    denied = CloudFault(401, "denied", "invalid token")
    faults = {  # noqa: RUF012 - as in all stand-ins, it is never changed
        "insufficient-capacity": CloudFault(503, "out_of_stock", "no machine is left"),
        "quota-exceeded": CloudFault(403, "quotas_exceeded", "quota exceeded"),
    }
    states = name_states(starting="starting", running="running", stopped="stopped")
    sells = """
    # type  places                                 accelerators  CPUs  memory   disk  price    spot
    DEV     east/east-1,east/east-2,west/west-1    -             3     4GiB     -     0.02EUR  -
    L4-2    east/east-1,west/west-1                2xL4/24GiB    16    96GiB    -     1.5EUR   -
    H100-8  east/east-2                            8xH100/80GiB  192   1920GiB  -     22EUR    -
    """

    def set_up(self) -> None:
        self.zones: dict[str, str] = {}  # by machine
        self.scripts: dict[str, str] = {}
        self.volumes: dict[str, str] = {}  # names, by machine

    def remains(self) -> Sequence[str]:
        alive = {each.id for each in self.cloud.billed()}
        return [f"the volume of {name}" for each, name in self.volumes.items() if each not in alive]

    def authorize(self, request: RestRequest) -> None:
        if request.headers.get("x-auth-token") != self.key:
            raise self.denied

    def describe(self, fault: CloudFault) -> object:
        return {"type": fault.code, "message": fault.message}

    def answer(self, request: RestRequest) -> tuple[int, object]:
        _, zones, zone, *rest = request.path.split("/")
        if zones != "zones":
            raise CloudFault(404, "not_found", request.path)
        match request.method, rest:
            case "GET", ["products"]:
                products = [_product(each) for each in PRODUCTS if zone in PRODUCTS[each][-1]]
                return self._page(products, request)
            case "GET", ["servers"]:
                here = [each for each in self.machines() if self.zones.get(each.id, zone) == zone]
                return self._page([*map(self._show, here), *self.others], request)
            case "GET", ["volumes"]:
                found = [
                    {"id": each, "name": name}
                    for each, name in self.volumes.items()
                    if self.zones[each] == zone
                ]
                return self._page(found, request)
            case "POST", ["servers"]:
                return 201, {"id": self._create(zone, request.body)}
            case "DELETE", ["volumes", volume] if volume in self.volumes:
                if volume in {each.id for each in self.cloud.billed()}:
                    raise CloudFault(400, "in_use", "the volume is attached")
                del self.volumes[volume]
                return 204, None
            case method, ["servers", machine, *action]:
                if self.zones.get(machine, zone) != zone:
                    raise CloudFault(404, "not_found", f"{machine} is not in {zone}")
                return self._change(method, machine, action, request.body)
        raise CloudFault(404, "not_found", request.path)

    def _create(self, zone: str, body: Any) -> str:
        types = [each for each, (*_, zones) in PRODUCTS.items() if zone in zones]
        fields = {"name": text(63), "commercial_type": one_of(types)}
        if wrong := wrong_field(body, fields, tuple(fields)):
            raise CloudFault(400, "invalid_arguments", wrong)
        new = self.prepare(body["name"])
        self.zones[new], self.volumes[new] = zone, body["name"]
        return new

    def _change(
        self, method: str, machine: str, action: list[str], body: Any
    ) -> tuple[int, object]:
        match method, action:
            case "GET", []:
                return 200, self._show(self.machine(machine))
            case "DELETE", []:
                self.end(machine)
                return 200, {"volume": machine}
            case "PATCH", ["user_data", "cloud-init"] if isinstance(body, str):
                self.scripts[self.new(machine).id] = body
                return 204, None
            case "POST", ["action"] if body == {"action": "poweron"}:
                self.power_on(machine, self.scripts[machine])
                return 202, {"task": "started"}
        raise CloudFault(400, "invalid_request", f"{method} {action} {body}")

    def _page(self, items: list[dict[str, Any]], request: RestRequest) -> tuple[int, object]:
        shown, _ = self.cut(items, int(request.query.get("page", 1)), 50)
        return 200, WithHeaders(list(shown), {"X-Total-Count": str(len(items))})

    def _show(self, machine: CloudMachine) -> dict[str, Any]:
        assert machine.created_at is not None
        return {
            "id": machine.id,
            "name": machine.name,
            "state": self.states[machine.state],
            "address": machine.address,
            "creation_date": machine.created_at.isoformat(),
        }


def _product(name: str) -> dict[str, Any]:
    gpu, gpus, gpu_gb, price, cpus, memory, _ = PRODUCTS[name]
    return {
        "name": name,
        "gpu": gpu,
        "gpus": gpus,
        "gpu_bytes": gpu_gb * 2**30,
        "monthly_price": price,
        "cpus": cpus,
        "ram_bytes": memory,
    }

"""A stand-in for the Prairie's API 1 over a cloud in memory."""

from collections.abc import Sequence
from typing import Any

from cavvy.providers.contract.rest_stand_in import (
    RestRequest,
    RestStandIn,
    name_states,
    one_of,
    text,
    wrong_field,
)
from cavvy.providers.vm.cloud import CloudFault, CloudMachine

PLANS = {  # id: GPU, GPUs, GiB of each, USD an hour, CPUs, GiB of memory
    "small": (None, 0, 0, "0.03", 4, 16),
    "one-t4": ("NVIDIA T4", 1, 16, "0.40", 4, 16),
    "eight-h100": ("NVIDIA H100", 8, 80, "23.20", 192, 2048),
    "next": ("NVIDIA Z9000", 1, 999, "9.99", 4, 16),
}
REGIONS = {"north": (*PLANS,), "south": ("small", "one-t4")}  # and the plans of each
_FIELDS = {
    "name": text(60),
    "plan": one_of(PLANS),
    "region": one_of(REGIONS),
    "script": text(65536),
    "ranch": text(40),
}
_FAULTS = {  # how the API reports these faults of the cloud in memory
    "insufficient-capacity": CloudFault(409, "sold_out", "no server of this plan is left"),
    "quota-exceeded": CloudFault(400, "limit", "the account's limit is reached"),
}


class PrairieStandIn(RestStandIn):
    """The API in front of a cloud in memory."""

    root = "/v1"
    denied = CloudFault(401, "key", "the key is not valid")
    faults = _FAULTS
    states = name_states(starting="building", running="up", stopped="off")
    # what the Prairie sells, as its price page states it; the suite compares the offers with it
    sells = """
    # type      places       accelerators  CPUs  memory  disk   price  spot
    small       north,south  -             4     16GiB   80GiB  0.03   -
    one-t4      north,south  1xT4/16GiB    4     16GiB   80GiB  0.40   -
    eight-h100  north        8xH100/80GiB  192   2TiB    80GiB  23.20  -
    """

    def set_up(self) -> None:
        self.disks: set[str] = set()  # by the id of the server; billed until they are deleted

    def remains(self) -> Sequence[str]:
        return [f"the disk of {each}" for each in sorted(self.disks)]

    def describe(self, fault: CloudFault) -> object:
        return {"code": fault.code, "text": fault.message}

    def answer(self, request: RestRequest) -> tuple[int, object]:
        match request.method, request.path.split("/")[1:]:
            case "GET", ["plans"]:
                plans = [_plan(each, region) for region in REGIONS for each in REGIONS[region]]
                return 200, self._page("plans", plans, request)
            case "GET", ["servers"]:
                shown = [self._show(each) for each in self.machines()]
                return 200, self._page("servers", [*shown, *self.others], request)
            case "POST", ["servers"]:
                if wrong := wrong_field(request.body, _FIELDS, ("name", "plan", "region")):
                    raise CloudFault(400, "invalid", wrong)
                new = self.start(request.body["name"], request.body["script"])
                self.disks.add(new)
                return 201, {"server": {"id": new}}
            case "GET", ["servers", machine]:
                return 200, {"server": self._show(self.machine(machine))}
            case "DELETE", ["servers", machine]:
                self.end(machine)
                if request.query.get("disk") == "delete":
                    self.disks.discard(machine)
                return 204, None
        raise CloudFault(404, "unknown", request.path)

    def _page(
        self, field: str, items: Sequence[dict[str, Any]], request: RestRequest
    ) -> dict[str, Any]:
        number = int(request.query.get("page", 1))
        shown, more = self.cut(items, number, 50)
        return {field: shown, "next": f"/{field}?page={number + 1}" if more else None}

    def _show(self, machine: CloudMachine) -> dict[str, Any]:
        assert machine.created_at is not None
        return {
            "id": machine.id,
            "name": machine.name,
            "state": self.states[machine.state],
            "address": machine.address or "",
            "created": machine.created_at.isoformat(),
        }


def _plan(plan: str, region: str) -> dict[str, Any]:
    gpu, gpus, gpu_gib, usd, cpus, memory = PLANS[plan]
    return {
        "id": plan,
        "gpu": gpu,
        "gpus": gpus,
        "gpu_gib": gpu_gib,
        "usd_an_hour": usd,
        "cpus": cpus,
        "memory_gib": memory,
        "disk_gib": 80,
        "region": region,
    }

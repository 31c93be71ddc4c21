"""A stand-in for the Prairie's API 1 over a cloud in memory."""

from collections.abc import Sequence
from typing import Any

from cavvy.providers.contract.rest_stand_in import (
    RestRequest,
    RestStandIn,
    one_of,
    text,
    wrong_field,
)
from cavvy.providers.vm.cloud import CloudFault, CloudMachine, MachineState

PLANS = {  # id: GPU, GPUs, GiB of each, USD an hour
    "small": (None, 0, 0, "0.03"),
    "one-t4": ("NVIDIA T4", 1, 16, "0.40"),
    "next": ("NVIDIA Z9000", 1, 999, "9.99"),
}
_FIELDS = {
    "name": text(60),
    "plan": one_of(PLANS),
    "region": one_of(("north",)),
    "script": text(65536),
    "ranch": text(40),
}
_FAULTS = {  # how the API reports these faults of the cloud in memory
    "insufficient-capacity": CloudFault(409, "sold_out", "no server of this plan is left"),
    "quota-exceeded": CloudFault(400, "limit", "the account's limit is reached"),
}
_STATES = {
    MachineState.STARTING: "building",
    MachineState.RUNNING: "up",
    MachineState.STOPPED: "off",
}


class PrairieStandIn(RestStandIn):
    """The API in front of a cloud in memory."""

    root = "/v1"
    denied = CloudFault(401, "key", "the key is not valid")
    faults = _FAULTS
    states = _STATES

    def describe(self, fault: CloudFault) -> object:
        return {"code": fault.code, "text": fault.message}

    def answer(self, request: RestRequest) -> tuple[int, object]:
        match request.method, request.path.split("/")[1:]:
            case "GET", ["plans"]:
                return 200, self._page("plans", [_plan(each) for each in PLANS], request)
            case "GET", ["servers"]:
                shown = [self._show(each) for each in self.machines()]
                return 200, self._page("servers", [*shown, *self.others], request)
            case "POST", ["servers"]:
                if wrong := wrong_field(request.body, _FIELDS, ("name", "plan", "region")):
                    raise CloudFault(400, "invalid", wrong)
                new = self.start(request.body["name"], request.body["script"])
                return 201, {"server": {"id": new}}
            case "GET", ["servers", machine]:
                return 200, {"server": self._show(self.machine(machine))}
            case "DELETE", ["servers", machine]:
                self.end(machine)
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


def _plan(plan: str) -> dict[str, Any]:
    gpu, gpus, gpu_gib, usd = PLANS[plan]
    return {
        "id": plan,
        "gpu": gpu,
        "gpus": gpus,
        "gpu_gib": gpu_gib,
        "usd_an_hour": usd,
        "cpus": 4,
        "memory_gib": 16,
        "disk_gib": 80,
        "region": "north",
    }

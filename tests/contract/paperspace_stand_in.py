"""A strict stand-in for Paperspace's API 1 over a cloud in memory: an HTTP server that refuses
requests which the reference (https://docs.digitalocean.com/reference/paperspace/api-reference, of
18 March 2026) does not allow. Startup scripts are kept apart from machines, and the templates of
Paperspace are listed without a key.

The reference lists no errors. The words about missing capacity are those of Paperspace's notebooks;
the others are made up.
"""

import itertools
from collections.abc import Sequence
from typing import Any

from cavvy.providers.contract import rest_stand_in as rest
from cavvy.providers.vm.cloud import CloudFault, CloudMachine, MachineState

PLAIN, GPU, H100, WINDOWS, OWN = "tkni3aa4", "t0nspur5", "tvimtol9", "twindow1", "town0001"
_CPUS, _GPUS = ("C5", "C9"), ("GPU+", "P4000", "P4000x2", "A4000", "A4000x2", "V100", "A100-80G")
OS_TEMPLATES = {  # id: agent, name, operating system, machine types
    PLAIN: ("LinuxHeadless", "Ubuntu 22.04 Server", "Ubuntu 22.04", (*_CPUS, *_GPUS)),
    "tdesk001": ("LinuxDesktop", "Ubuntu 22.04 Desktop", "Ubuntu 22.04", (*_CPUS, *_GPUS)),
    "told0001": ("LinuxHeadless", "Ubuntu 20.04 Server", "Ubuntu 20.04", (*_CPUS, *_GPUS)),
    GPU: ("LinuxHeadless", "ML-in-a-Box", "Ubuntu 22.04", (*_GPUS, "C9")),
    H100: ("LinuxHeadless", "ML-in-a-Box H100", "Ubuntu 22.04", ("H100", "H100x8")),
    WINDOWS: ("WindowsDesktop", "Windows 10", "Windows 10", (*_CPUS, "V100-32G")),
}
OWN_TEMPLATES = {OWN: ("LinuxHeadless", "our template", "Debian 12", ("C5", "A4000"))}
_OFF = ("A4000x2",)  # listed, but not available
NETWORK = "nk8mqmk0"
_SETTINGS = {"network": NETWORK}
_FAULTS = {
    "insufficient-capacity": CloudFault(
        400, "BAD_REQUEST", "We are currently out of capacity for the selected VM type."
    ),
    "quota-exceeded": CloudFault(400, "BAD_REQUEST", "The limit of the team is reached."),
    "forbidden": CloudFault(403, "FORBIDDEN", "Forbidden."),
    "not-found": CloudFault(404, "NOT_FOUND", "Machine not found."),
    "internal-error": CloudFault(500, "INTERNAL_SERVER_ERROR", "Something went wrong."),
    "unavailable": CloudFault(503, "SERVICE_UNAVAILABLE", "Try again later."),
}
_FIELDS = {
    "name": rest.text(1000, r".+"),
    "machineType": rest.text(100),
    "templateId": rest.one_of((*OS_TEMPLATES, *OWN_TEMPLATES)),
    "networkId": rest.one_of((NETWORK,)),
    "diskSize": rest.one_of((50, 100, 250, 500, 1000, 2000)),
    "region": rest.one_of(("ny2", "ca1", "ams1")),
    "publicIpType": rest.one_of(("static", "dynamic", "none")),
    "autoSnapshotEnabled": rest.flag,
    "autoSnapshotFrequency": rest.one_of(("hourly", "daily", "weekly", "monthly")),
    "autoSnapshotSaveCount": lambda value: isinstance(value, int),
    "autoShutdownEnabled": rest.flag,
    "autoShutdownTimeout": lambda value: isinstance(value, int),
    "autoShutdownForce": rest.flag,
    "takeInitialSnapshot": rest.flag,
    "restorePointEnabled": rest.flag,
    "restorePointFrequency": rest.one_of(("shutdown",)),
    "startupScriptId": rest.text(100),
    "emailPassword": rest.flag,
    "startOnCreate": rest.flag,
    "enableNvlink": rest.flag,
    "accessorIds": rest.list_of(rest.text(100)),
}
_REQUIRED = ("name", "machineType", "templateId", "diskSize", "region")
_SCRIPT_FIELDS = {
    "name": rest.text(1000, r".+"),
    "script": rest.text(16384),
    "isRunOnce": rest.flag,
}


class PaperspaceStandIn(rest.RestStandIn):
    """The API in front of a cloud in memory."""

    # what the cloud sells, as its prices and types state it
    sells = """
    # type    places  accelerators   CPUs  memory   disk   price  spot
    A100-80G  us-ny2  1xA100/80GiB   12    80GiB    93GiB  3.18   -
    A4000     us-ny2  1xA4000/16GiB  8     32GiB    93GiB  0.76   -
    C5        us-ny2  -              4     8796MiB  93GiB  0.08   -
    C9        us-ny2  -              24    129GiB   93GiB  0.9    -
    GPU+      us-ny2  1xM4000/8GiB   8     32GiB    93GiB  0.45   -
    H100      us-ny2  1xH100/80GiB   15    80GiB    93GiB  5.95   -
    H100x8    us-ny2  8xH100/80GiB   128   640GiB   93GiB  47.6   -
    P4000     us-ny2  1xP4000/8GiB   8     32GiB    93GiB  0.51   -
    P4000x2   us-ny2  2xP4000/8GiB   16    64GiB    93GiB  1.02   -
    V100      us-ny2  1xV100/16GiB   8     32GiB    93GiB  2.29   -
    """

    root, key = "/v1", "key-of-paperspace"
    denied = CloudFault(401, "UNAUTHORIZED", "Unauthorized.")
    faults = _FAULTS
    states = rest.name_states(starting="provisioning", running="ready", stopped="off")
    settings = _SETTINGS

    def set_up(self) -> None:
        self.scripts: dict[str, dict[str, Any]] = {}  # that exist, by id
        self.requests: list[dict[str, Any]] = []  # bodies of requests for machines
        self.public: set[str] = set()  # names of machines with public addresses
        self.listings = 0  # lists of the scripts
        self.holds_early = False  # machines that are provisioned cannot be deleted
        self._ids = itertools.count(1)

    def remains(self) -> Sequence[str]:
        return [f"the script {each}" for each in self.scripts]

    def describe(self, fault: CloudFault) -> object:
        return {"code": fault.code, "message": fault.message}

    def authorize(self, request: rest.RestRequest) -> None:
        if request.path != "/os-templates":
            super().authorize(request)

    def answer(self, request: rest.RestRequest) -> tuple[int, object]:
        match request.method, request.path.split("/")[1:]:
            case "GET", ["os-templates"]:
                shown = [_template(each, *told) for each, told in OS_TEMPLATES.items()]
                return 200, self._page(shown, request)
            case "GET", ["custom-templates"]:
                shown = [_template(each, *told) for each, told in OWN_TEMPLATES.items()]
                return 200, self._page(shown, request)
            case "GET", ["machines"]:
                shown = [self._show(each) for each in self.machines()] + self.others
                return 200, self._page(shown, request)
            case "GET", ["machines", machine]:
                return 200, self._show(self.machine(machine))
            case "POST", ["machines"]:
                return 200, self._create(request.body)
            case "DELETE", ["machines", machine]:
                return 200, self._delete(machine)
            case "GET", ["startup-scripts"]:
                self.listings += 1
                shown = [_hide(each) for each in self.scripts.values()]
                return 200, self._page(shown, request)
            case "POST", ["startup-scripts"]:
                _check(request.body, _SCRIPT_FIELDS, ("name", "script"))
                return 200, self._add_script(request.body)
            case "DELETE", ["startup-scripts", script] if script in self.scripts:
                return 200, _hide(self.scripts.pop(script))
        raise CloudFault(404, "NOT_FOUND", request.path)

    def _page(self, items: list[dict[str, Any]], request: rest.RestRequest) -> dict[str, Any]:
        size, number = int(request.query.get("limit", 20)), int(request.query.get("after", 1))
        if not 1 <= size <= 120:
            raise CloudFault(400, "BAD_REQUEST", "limit is invalid")
        shown, more = self.cut(items, number, size)
        return {"hasMore": more, "nextPage": str(number + 1) if more else None, "items": shown}

    def _add_script(self, body: Any) -> dict[str, Any]:
        new = f"sc{next(self._ids):06d}"
        self.scripts[new] = {
            **body,
            "id": new,
            "description": None,
            "isEnabled": True,
            "assignedMachineIds": [],
            "dtCreated": self.cloud.time.isoformat(),
            "dtDeleted": None,
        }
        return _hide(self.scripts[new])

    def _create(self, body: Any) -> dict[str, Any]:
        _check(body, _FIELDS, _REQUIRED)
        (types,) = [
            told[3]
            for each, told in (OS_TEMPLATES | OWN_TEMPLATES).items()
            if each == body["templateId"]
        ]
        script = self.scripts.get(body.get("startupScriptId"))
        if body["machineType"] not in types or script is None or not script["isRunOnce"]:
            raise CloudFault(400, "BAD_REQUEST", "machineType or startupScriptId is invalid")
        new = self.start(body["name"], script["script"].replace("#!/bin/bash", "#!/bin/sh", 1))
        script["assignedMachineIds"].append(new)
        self.requests.append(body)
        if body.get("publicIpType", "none") != "none":
            self.public.add(body["name"])
        return {"event": _event("create", new), "data": {"id": new, "name": body["name"]}}

    def _delete(self, machine: str) -> dict[str, Any]:
        if self.holds_early and self.machine(machine).state is MachineState.STARTING:
            raise CloudFault(400, "BAD_REQUEST", "This machine is currently provisioning.")
        self.end(machine)
        return {"event": _event("destroy", machine), "data": {"id": machine}}

    def _show(self, machine: CloudMachine) -> dict[str, Any]:
        assert machine.created_at is not None
        created = machine.created_at.strftime("%Y-%m-%dT%H:%M:%S.000Z")
        return {
            "id": machine.id,
            "name": machine.name,
            "state": self.states[machine.state],
            "os": "Ubuntu 22.04",
            "machineType": "C5",
            "agentType": "LinuxHeadless",
            "accelerators": [],
            "region": "East Coast (NY2)",
            "privateIp": machine.address,
            "networkId": NETWORK,
            "publicIp": "198.51.100.7" if machine.name in self.public else None,
            "publicIpType": "dynamic" if machine.name in self.public else "none",
            "usageRate": 0.08,
            "storageRate": 7,
            "dtCreated": created,
            "dtModified": created,
            "dtDeleted": None,
            "reservation": None,
        }


def _check(body: Any, fields: Any, required: Any) -> None:
    if wrong := rest.wrong_field(body, fields, required):
        raise CloudFault(400, "BAD_REQUEST", f"{wrong} is invalid")


def _hide(script: dict[str, Any]) -> dict[str, Any]:
    """A script as lists and replies contain it: without its text."""
    return {name: value for name, value in script.items() if name != "script"}


def _event(name: str, machine: str) -> dict[str, Any]:
    return {"id": f"event-of-{machine}", "name": name, "state": "new", "machineId": machine}


def _template(
    number: str, agent: str, name: str, system: str, types: tuple[str, ...]
) -> dict[str, Any]:
    return {
        "id": number,
        "name": name,
        "agentType": agent,
        "operatingSystemLabel": system,
        "defaultSizeGb": 50,
        "availableMachineTypes": [
            {"machineTypeLabel": each, "isAvailable": each not in _OFF} for each in types
        ],
        "dtCreated": "2024-02-22T10:00:00.000Z",
    }

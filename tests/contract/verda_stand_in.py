"""A strict stand-in for Verda's API 1 over a cloud in memory: an HTTP server that refuses requests
which Verda's own Python package (`verda` 1.25.0, for https://api.verda.com/v1/docs, November 2026)
would not send. Access tokens last ten minutes; startup scripts are kept apart from instances.

Verda's documentation does not list the messages of errors. Those about instances that are gone or
still provisioning are known from users of the API; those about capacity are made up.
"""

import itertools
from collections.abc import Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

from cavvy.providers.contract import rest_stand_in as rest
from cavvy.providers.vm.cloud import CloudFault, CloudMachine, MachineState

_CUDA = ["ubuntu-24.04-cuda-12.8-open-docker", "ubuntu-24.04-cuda-13.0-open-docker", "fastai"]
_PLAIN = ["ubuntu-22.04", "ubuntu-24.04"]
TYPES = {  # name: USD an hour, cores, GB of memory, GPU, GPUs, GB of all GPUs
    "CPU.4V.16G": ("0.0279", 4, 16, "", 0, 0),
    "1V100.6V": ("0.1381", 6, 23, "1x Tesla V100 16GB", 1, 16),
    "8H100.80S.176V": ("18.32", 176, 1480, "8x H100 SXM5 80GB", 8, 640),
    "1B300.30V": ("4.95", 30, 275, "1x B300 SXM6 268GB", 1, 268),
    "1Z9000.1V": ("9.99", 1, 10, "1x Z9000 SXM9 999GB", 1, 999),
}
LOCATIONS = ("FIN-01", "ICE-01")
SPOT_LOCATION = "FIN-01"
SPOT_PRICES = {"CPU.4V.16G": "0.0119", "8H100.80S.176V": "6.41"}  # of the types sold as spot
_INVALID = "invalid_request"
_VOLUME = "46fc0247-8f65-4d8a-ad73-852a8b3dc1d3"
_TOKEN_S = 600
_SETTINGS = {"client_id": "client-1"}
_FAULTS = {
    "insufficient-capacity": CloudFault(400, _INVALID, "Not enough resources available."),
    "quota-exceeded": CloudFault(402, "insufficient_funds", "Insufficient funds."),
    "forbidden": CloudFault(403, "forbidden_action", "Forbidden."),
    "not-found": CloudFault(400, _INVALID, "Invalid instance id"),
    "internal-error": CloudFault(500, "server_error", "Something went wrong."),
    "unavailable": CloudFault(503, "service_unavailable", "Try again later."),
}


class VerdaStandIn(rest.RestStandIn):
    """The API in front of a cloud in memory."""

    # what the cloud sells, as its prices and types state it
    sells = """
    # type          places         accelerators   CPUs  memory   disk    price   spot
    1B300.30V       FIN-01,ICE-01  1xB300/288GiB  30    275GiB   100GiB  4.95    -
    1V100.6V        FIN-01,ICE-01  1xV100/16GiB   6     23GiB    100GiB  0.1381  -
    8H100.80S.176V  FIN-01         8xH100/80GiB   176   1480GiB  100GiB  18.32   6.41
    CPU.4V.16G      FIN-01         -              4     16GiB    100GiB  0.0279  0.0119
    8H100.80S.176V  ICE-01         8xH100/80GiB   176   1480GiB  100GiB  18.32   -
    CPU.4V.16G      ICE-01         -              4     16GiB    100GiB  0.0279  -
    """
    unknown = "Z9000 SXM9 999GB"

    root, key = "/v1", "secret-of-verda"
    key_file = "client_secret = {key}\n"
    settings = _SETTINGS
    denied = CloudFault(401, "unauthorized_request", "Access token is missing or invalid.")
    faults = _FAULTS
    states = rest.name_states(starting="provisioning", running="running", stopped="offline")

    def set_up(self) -> None:
        self.scripts: dict[str, str] = {}  # that exist, by id
        self.names: dict[str, str] = {}  # of scripts, by id
        self.scripts_of: dict[str, str] = {}  # by hostname
        self.images: list[str] = []  # that were requested
        self.spot: set[str] = set()  # hostnames of spot instances
        self.taken: dict[str, CloudMachine] = {}  # reclaimed spot instances, by id
        self.logins = 0
        self.holds_early = False  # instances that are provisioned cannot be deleted
        self.tokens: dict[str, datetime] = {}  # and when they end
        self._ids = itertools.count(1)

    def reclaim(self, machine: str) -> None:
        """End a spot instance as Verda does: it is no longer listed, but still described."""
        self.taken[machine] = self.machine(machine)
        self.cloud.change(machine, ended=self.cloud.time)

    def remains(self) -> Sequence[str]:
        return [f"the script {each}" for each in self.scripts]

    def describe(self, fault: CloudFault) -> object:
        return {"code": fault.code, "message": fault.message}

    def authorize(self, request: rest.RestRequest) -> None:
        if request.path == "/oauth2/token":
            return
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self.cloud.time >= self.tokens.get(token, self.cloud.time):
            raise self.denied

    def answer(self, request: rest.RestRequest) -> tuple[int, object]:
        match request.method, request.path.split("/")[1:]:
            case "POST", ["oauth2", "token"]:
                return 200, self._log_in(request.body)
            case "GET", ["instance-types"]:
                # an account may have another currency than dollars
                return 200, [_type(each, request.query.get("currency", "eur")) for each in TYPES]
            case "GET", ["instance-availability"]:
                return 200, _list_available(request.query["isSpot"])
            case "GET", ["instances"]:
                return 200, [self._show(each) for each in self.machines()] + self.others
            case "GET", ["instances", machine]:
                return 200, self._show(self.taken.get(machine) or self.machine(machine))
            case "GET", ["scripts"]:
                found = self.scripts.items()
                return 200, [{"id": n, "name": self.names[n], "script": s} for n, s in found]
            case "POST", ["scripts"]:
                fields = {"name": rest.text(60), "script": rest.text(65536)}
                _check(request.body, fields, fields)
                new = f"script-{next(self._ids)}"
                self.scripts[new] = request.body["script"]
                self.names[new] = request.body["name"]
                return 201, new.encode()
            case "DELETE", ["scripts", script] if script in self.scripts:
                del self.scripts[script]
                return 200, None
            case "POST", ["instances"]:
                return 202, self._create(request.body).encode()
            case "PUT", ["instances"]:
                self._delete(request.body)
                return 202, None
        raise CloudFault(404, "not_found", request.path)

    def _log_in(self, body: Any) -> dict[str, Any]:
        fields = {
            "grant_type": rest.one_of(("client_credentials",)),
            "client_id": rest.one_of(("client-1",)),
            "client_secret": rest.one_of((self.key,)),
        }
        if rest.wrong_field(body, fields, fields):
            raise CloudFault(401, "unauthorized_request", "Invalid client id or client secret")
        self.logins += 1
        self.tokens[f"token-{self.logins}"] = self.cloud.time + timedelta(seconds=_TOKEN_S)
        return {
            "access_token": f"token-{self.logins}",
            "token_type": "Bearer",
            "expires_in": _TOKEN_S,
            "refresh_token": "refresh",
            "scope": "cloud-api-v1",
        }

    def _create(self, body: Any) -> str:
        fields = {
            "instance_type": rest.one_of(TYPES),
            "image": rest.one_of((*_CUDA, *_PLAIN)),
            "hostname": rest.text(60, r"[a-z0-9][a-z0-9-]*"),
            "description": rest.text(60),
            "location_code": rest.one_of(LOCATIONS),
            "ssh_key_ids": rest.list_of(rest.text(36)),
            "startup_script_id": rest.one_of(self.scripts),
            "os_volume": _is_volume,
            "is_spot": rest.flag,
        }
        _check(body, fields, ("instance_type", "image", "hostname", "description"))
        if body["image"] not in _type(body["instance_type"])["supported_os"]:
            raise CloudFault(400, _INVALID, "Operating system is not valid for this instance type")
        if body.get("is_spot"):
            self._check_spot(body)
        elif "on_spot_discontinue" in body["os_volume"]:
            raise CloudFault(400, _INVALID, "on_spot_discontinue is only for spot instances")
        self.scripts_of[body["hostname"]] = body["startup_script_id"]
        new = self.start(body["hostname"], self.scripts[body["startup_script_id"]])
        self.images.append(body["image"])
        return new

    def _check_spot(self, body: Any) -> None:
        sold = body["instance_type"] in SPOT_PRICES and body["location_code"] == SPOT_LOCATION
        if not sold:
            raise CloudFault(400, _INVALID, "Not enough resources available.")
        if body["os_volume"].get("on_spot_discontinue") != "delete_permanently":
            raise AssertionError("the volume of a reclaimed instance would be kept and billed")
        self.spot.add(body["hostname"])

    def _delete(self, body: Any) -> None:
        fields = {
            "id": rest.list_of(rest.text(36)),
            "action": rest.one_of(("delete",)),
            "volume_ids": rest.list_of(rest.one_of((_VOLUME,))),
            "delete_permanently": rest.flag,
        }
        _check(body, fields, ("id", "action"))
        for machine in body["id"]:
            if self.holds_early and self.machine(machine).state is MachineState.STARTING:
                message = "Can't discontinue a provisioning instance"
                raise CloudFault(400, _INVALID, message)
            listed = machine in [each.id for each in self.machines()]
            if listed and not body.get("volume_ids"):
                raise AssertionError("the volume of the instance would be kept and billed")
            self.end(machine)

    def _show(self, machine: CloudMachine) -> dict[str, Any]:
        assert machine.created_at is not None
        return {
            "id": machine.id,
            "hostname": machine.name,
            "description": machine.name,
            "status": "discontinued" if machine.id in self.taken else self.states[machine.state],
            "created_at": machine.created_at.strftime("%Y-%m-%dT%H:%M:%S.000Z"),
            "ip": machine.address,
            "instance_type": "CPU.4V.16G",
            "price_per_hour": 0.0279,
            "location": LOCATIONS[0],
            "os_volume_id": _VOLUME,
            "startup_script_id": self.scripts_of.get(machine.name),
            "ssh_key_ids": [],
            "is_spot": machine.name in self.spot,
        }


def _list_available(spot: str) -> list[dict[str, Any]]:
    if spot == "true":
        return [{"location_code": SPOT_LOCATION, "availabilities": list(SPOT_PRICES)}]
    return [{"location_code": each, "availabilities": list(TYPES)} for each in LOCATIONS]


def _check(body: Any, fields: Any, required: Any) -> None:
    if wrong := rest.wrong_field(body, fields, required):
        raise CloudFault(400, _INVALID, f"{wrong} is invalid")


def _is_volume(volume: Any) -> bool:
    fields = {
        "name": rest.text(60),
        "size": lambda size: isinstance(size, int) and size >= 50,
        "on_spot_discontinue": rest.one_of(
            ("keep_detached", "move_to_trash", "delete_permanently")
        ),
    }
    return rest.wrong_field(volume, fields, ("name", "size")) is None


def _type(name: str, currency: str = "usd") -> dict[str, Any]:
    usd, cores, memory, gpu, gpus, vram = TYPES[name]

    def price(usd: str) -> str:
        return usd if currency == "usd" else f"{Decimal(usd) * Decimal('0.9')}"

    return {
        "id": f"id-of-{name}",
        "instance_type": name,
        "price_per_hour": price(usd),
        "spot_price": price(SPOT_PRICES.get(name, usd)),
        "description": "Dedicated hardware instance",
        "cpu": {"description": f"{cores} CPU", "number_of_cores": cores},
        "gpu": {"description": gpu, "number_of_gpus": gpus},
        "memory": {"description": f"{memory}GB RAM", "size_in_gigabytes": memory},
        "gpu_memory": {"description": f"{vram}GB GPU RAM", "size_in_gigabytes": vram},
        "storage": {"description": "dynamic"},
        "currency": currency,
        "supported_os": _CUDA if gpus else _PLAIN,
    }

"""A stand-in for IBM Cloud's bare metal servers for VPC, besides the stand-in for the rest of IBM
Cloud.

The models are those of IBM's Python package ibm-vpc 0.36.0. That a server must be powered off
before it is deleted is in https://cloud.ibm.com/docs/vpc?topic=vpc-managing-bare-metal-servers
(2026-02-24); the code of the refusal is made up. That a server which is still being provisioned can
be deleted is what IBM's Terraform provider does. The unit of the prices is what users of the
catalog report.
"""

from collections.abc import Mapping
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Any

from tests.contract.ibm_stand_in import HOME, IMAGES, IbmStandIn, image_id, show_profile

from cavvy.providers.contract.rest_stand_in import (
    Check,
    RestRequest,
    list_of,
    one_of,
    text,
    wrong_field,
)
from cavvy.providers.vm.cloud import CloudFault, CloudMachine, MachineState

# name: cores, GiB of memory, GB of the boot disk, Mbit/s, USD per hour in us-south
SERVERS: dict[str, tuple[int, int, int, int, float]] = {
    "bx2-metal-96x384": (48, 384, 960, 100_000, 5.2),
    "mx3-metal-16x128": (8, 128, 480, 200_000, 1.95),
    "cx3-metal-48x128": (24, 128, 480, 200_000, 0),  # has no price
    "bx3-metal-64x256": (32, 256, 480, 200_000, 4.1),  # no setting names it
}
_SERVICE = "is-bare-metal-server-id"
_ID: Check = lambda value: wrong_field(value, {"id": text(64, r"[-0-9a-z_]+")}, ["id"]) is None  # noqa: E731
_INITIALIZATION: Mapping[str, Check] = {
    "image": _ID,
    "keys": list_of(_ID),
    "user_data": text(65_536),
}
_NETWORK: Mapping[str, Check] = {"subnet": _ID, "security_groups": list_of(_ID)}
_FIELDS: Mapping[str, Check] = {
    "name": text(63, r"([a-z]|[a-z][-a-z0-9]*[a-z0-9])"),
    "zone": lambda value: wrong_field(value, {"name": text(63)}, ["name"]) is None,
    "profile": lambda value: wrong_field(value, {"name": one_of(SERVERS)}, ["name"]) is None,
    "initialization": lambda value: wrong_field(value, _INITIALIZATION, ["image"]) is None,
    "primary_network_interface": lambda value: wrong_field(value, _NETWORK, ["subnet"]) is None,
    "resource_group": _ID,
}
_REQUIRED = ("initialization", "primary_network_interface", "profile", "zone")


class IbmMetalStandIn(IbmStandIn):
    """An account whose settings name bare metal profiles only."""

    # what the cloud sells, as its prices and types state it
    sells = """
    # type            places               accelerators  CPUs  memory  disk    price  spot
    bx2-metal-96x384  us-south/us-south-1  -             96    384GiB  894GiB  5.2    -
    mx3-metal-16x128  us-south/us-south-1  -             16    128GiB  447GiB  1.95   -
    """
    minimum_charges = MappingProxyType({"": timedelta(hours=1)})

    def set_up(self) -> None:
        super().set_up()
        named = "bx2-metal-96x384, mx3-metal-16x128, cx3-metal-48x128"
        self.settings = {**self.settings, "bare_metal_profiles": named, "cpu_profiles": "none"}
        self.slow_stops = False  # whether a stop takes until the clock moves
        self.stops: dict[str, datetime] = {}  # when each server was asked to stop

    def answer(self, request: RestRequest) -> tuple[int, object]:
        match request.path.split("/")[2:]:
            case ["catalog", "api", "v1", ""] if "bare-metal" in request.query["q"]:
                return 200, {"resources": [{"id": _SERVICE, "name": "is.bare-metal-server"}]}
            case ["catalog", "api", "v1", service, "plan"] if service == _SERVICE:
                plans = [{"id": f"plan-{name}", "name": name} for name in SERVERS]
                return 200, {"count": len(plans), "resources": plans}
            case ["catalog", "api", "v1", plan, *_] if plan.removeprefix("plan-") in SERVERS:
                return 200, {"resources": [_show_price(plan.removeprefix("plan-"))]}
        return super().answer(request)

    def _answer(self, region: str, path: list[str], request: RestRequest) -> tuple[int, object]:
        for machine, at in self.stops.items():
            if not self.slow_stops or self.cloud.time > at:
                self.cloud.change(machine, off=True)
        match request.method, path:
            case "GET", [("instance" | "bare_metal_server") as kind, "profiles"]:
                metal = kind == "bare_metal_server"
                shown = [_show_server_profile(region, each) for each in SERVERS]
                plain = [show_profile(region, "cx2-2x4")]
                return 200, self._page(region, "profiles", shown if metal else plain, request)
            case "GET", ["instances"]:
                return 200, self._page(region, "instances", [], request)
            case _, ["instances", *_]:
                raise AssertionError("no instance is made here")
            case _, ["bare_metal_servers", *rest]:
                return self._answer_servers(region, rest, request)
        return super()._answer(region, path, request)

    def _answer_servers(
        self, region: str, path: list[str], request: RestRequest
    ) -> tuple[int, object]:
        match request.method, path:
            case "GET", []:
                ours = [each for each in self.machines() if self._region(each.id) == region]
                shown = [*map(self._show, ours), *(self.others if region == HOME else [])]
                return 200, self._page(region, "bare_metal_servers", shown, request)
            case "POST", []:
                return 201, self._create(region, request.body)
            case "POST", [server, "stop"]:
                self._stop(self._find(region, server), request.body)
                return 204, None
            case "DELETE", [server]:
                if self._status(self._find(region, server)) is MachineState.RUNNING:
                    raise CloudFault(409, "server_not_stopped", "The server must be stopped.")
        return super()._answer(region, ["instances", *path], request)

    def _check(self, region: str, body: Any) -> None:
        if wrong := wrong_field(body, _FIELDS, _REQUIRED):
            raise CloudFault(400, "validation_failed", f"{wrong}: {body.get(wrong)}")
        subnet = body["primary_network_interface"]["subnet"]["id"]
        zones = [each["zone"]["name"] for each in self.subnets if each["id"] == subnet]
        good = zones == [body["zone"]["name"]] and zones[0].startswith(f"{region}-")
        if not good or body["initialization"]["image"]["id"] not in map(image_id, IMAGES):
            raise CloudFault(400, "bad_field", "a value does not fit the others")

    def _create(self, region: str, body: Any) -> dict[str, Any]:
        self._check(region, body)
        return self._make(region, body, body["initialization"]["user_data"])

    def _status(self, machine: str) -> MachineState:
        """The state of a server, also before the list shows it."""
        rented = next((each for each in self.cloud.billed() if each.id == machine), None)
        if rented is None:
            raise self.faults["not-found"]
        if rented.off:
            return MachineState.STOPPED
        booted = self.cloud.time - rented.at >= self.cloud.boot_time
        return MachineState.RUNNING if booted else MachineState.STARTING

    def _stop(self, machine: str, body: Any) -> None:
        assert body == {"type": "hard"}
        if self.cloud.fails_deletions:
            raise self.faults["internal-error"]
        if self._status(machine) is not MachineState.RUNNING:
            raise CloudFault(409, "server_not_running", "The server must be running.")
        self.stops.setdefault(machine, self.cloud.time)

    def _show(self, machine: CloudMachine) -> dict[str, Any]:
        shown = super()._show(machine)
        del shown["availability"]
        return {**shown, "resource_type": "bare_metal_server"}


def _show_server_profile(region: str, name: str) -> dict[str, Any]:
    cores, memory, disk, bandwidth, _ = SERVERS[name]
    third = "x3" in name
    several = {"type": "enum", "default": bandwidth, "values": [25_000, bandwidth]}
    return {
        "name": name,
        "family": "balanced",
        "cpu_architecture": {"type": "fixed", "default": "amd64", "value": "amd64"},
        "cpu_core_count": {"type": "fixed", "value": cores},
        "memory": {"type": "fixed", "value": memory},
        "bandwidth": several if third else {"type": "fixed", "value": bandwidth},
        "disks": [{"quantity": {"type": "fixed", "value": 1}, "size": {"value": disk}}],
        "resource_type": "bare_metal_server_profile",
        "zones": [{"name": f"{region}-1"}],
    }


def _show_price(name: str) -> dict[str, Any]:
    usd = SERVERS[name][4]
    amounts = [
        {"country": country, "currency": currency, "prices": [{"quantity_tier": 1, "price": price}]}
        for country, currency, price in (("DEU", "EUR", usd * 0.9), ("USA", "USD", usd))
    ]
    metric = {"metric_id": f"part-x-{name}", "charge_unit_name": "BARE_METAL_SERVER_HOURS"}
    other = {"metric_id": "part-y", "charge_unit_name": "RESERVED_HOURS", "amounts": amounts[:1]}
    return {
        "deployment_location": HOME,
        "deployment_region": HOME,
        "metrics": [other, {**metric, "amounts": amounts}],
    }

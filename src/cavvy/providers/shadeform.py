"""Shadeform: each node is an instance in one of Shadeform's clouds, and starts the agent on boot.

`ShadeformCloud` calls Shadeform's API, version 1 (https://docs.shadeform.ai/api-reference).

Shadeform rents machines of many clouds through one account. An instance type consists of the cloud
and Shadeform's name for the machine, such as "hyperstack.A6000".
"""

import base64
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime

from cavvy.catalog.accelerators import KnownAccelerator, identify
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.tasks import Scalar
from cavvy.domain.units import HourlyRate, parse_rate
from cavvy.providers.base import Feature
from cavvy.providers.settings import project_text, regions_setting
from cavvy.providers.vm import cloud as vm
from cavvy.providers.vm.abilities import make_manifest, reach_setting
from cavvy.providers.vm.account import RestAccount, keep_ours
from cavvy.providers.vm.keys import ApiKeySource
from cavvy.providers.vm.rest import Json

KEYS = ApiKeySource(
    provider="shadeform",
    variables=("SHADEFORM_API_KEY",),
    files=("~/.shadeform/api_key",),
    made_at="https://platform.shadeform.ai/settings/api",
)
_REFERENCE = "https://docs.shadeform.ai/api-reference/instances"

MANIFEST = make_manifest(
    "shadeform",
    "Shadeform",
    cloud="cavvy.providers.shadeform:ShadeformCloud",
    machine="an instance",
    deletion=f"{_REFERENCE}/instances-delete",
    rights=(
        "an API key of the account; Shadeform's documentation describes no narrower permissions"
    ),
    unsupported={
        Feature.CAPACITY: f"{_REFERENCE}/instances-types",
        Feature.SELF_END: f"{_REFERENCE}/instances-delete",
        Feature.VOLUMES: "https://docs.shadeform.ai/guides/attachvolume",
        Feature.NETWORK: "Shadeform's API does not report the speed of the network "
        f"({_REFERENCE}/instances-types)",
        Feature.DISK: f"{_REFERENCE}/instances-create",
        Feature.NOTICE: "Shadeform shows the deadline of a spot instance in its API only, not on "
        "the instance (https://docs.shadeform.ai/guides/spotinstances)",
    },
    settings=(
        KEYS.setting(),
        project_text(
            "clouds",
            "The clouds to use, by Shadeform's names, separated by commas, such as `hyperstack, "
            "lambdalabs`. The default is all clouds.",
        ),
        regions_setting("regions"),
        project_text(
            "os",
            "The operating system of instances, by Shadeform's name. By default, Shadeform "
            "chooses the system for the instance type.",
        ),
        reach_setting(),
    ),
    endpoint="https://api.shadeform.ai/v1",
)


# The documentation mentions errors for missing capacity and for types without spot instances in a
# region, but does not give their texts. These words are assumptions.
# Only the message tells missing capacity from other faults.
_FULL = re.compile(r"capacity|stock|sold out|not available|unavailable|\bspot\b", re.IGNORECASE)
_MICROS_PER_CENT = 10_000
# names of GPUs with Arm CPUs (Grace), because the API does not report the CPUs' architecture
_ARM = ("GH", "GB")
_RENTALS = {"on_demand": Purchase.ON_DEMAND, "spot": Purchase.SPOT}


class ShadeformCloud:
    """Implements `Cloud`."""

    # Shadeform does not document the maximum length of names; 60 is an assumption.
    traits = vm.CloudTraits(name_limit=60)

    def __init__(self, settings: Mapping[str, Scalar], now: Callable[[], datetime]) -> None:
        self.account = RestAccount(settings, now, KEYS, _read_error, key_header="X-API-KEY")
        self._api = self.account.api

    async def offers(self) -> Sequence[Offer]:
        clouds = self.account.names("clouds")
        told = (await self._api.get("/instances/types?available=true"))["instance_types"]
        # containers are left out, because they run no start script and cannot start further
        # containers
        kinds = [each for each in told if each.get("deployment_type") != "container"]
        self.account.note_unknown(
            str(each["configuration"]["gpu_type"]) for each in kinds if _identify(each) is None
        )
        return [
            offer
            for each in kinds
            if (known := _identify(each)) and (not clouds or each["cloud"] in clouds)
            for offer in self._list_offers(each, known)
        ]

    async def create(self, request: vm.MachineRequest) -> Sequence[str]:
        cloud, _, kind = request.offer.instance_type.partition(".")
        script = base64.b64encode(request.user_data[0].encode()).decode()
        body = {
            "cloud": cloud,
            "region": request.offer.region,
            "shade_instance_type": kind,
            # True: the instance runs in Shadeform's own account with that cloud
            "shade_cloud": True,
            "name": request.names[0],
            "launch_configuration": {
                "type": "script",
                "script_configuration": {"base64_script": script},
            },
        }
        if request.offer.purchase is Purchase.SPOT:
            body["rental_type"] = "spot"
        if system := self.account.settings.get("os"):
            body["os"] = system
        return [str((await self._api.send("POST", "/instances/create", body))["id"])]

    async def list(self) -> Sequence[vm.CloudMachine]:
        return [_read(each) for each in keep_ours((await self._api.get("/instances"))["instances"])]

    async def get(self, machine: str) -> vm.CloudMachine | None:
        return _read(await self._api.get(f"/instances/{machine}/info"))

    async def delete(self, machine: str) -> None:
        await self._api.send("POST", f"/instances/{machine}/delete")

    def is_full(self, fault: vm.CloudFault) -> bool:
        return fault.refuses(_FULL)

    def _list_offers(self, kind: Json, known: KnownAccelerator) -> Iterator[Offer]:
        """Yield the offers of one instance type, one for each region and kind of rental."""
        config = kind["configuration"]
        for place in kind["availability"]:
            rental = _RENTALS.get(place.get("rental_type", "on_demand"))
            if not place["available"] or rental is None:
                continue
            if self.account.allows(str(place["region"])):
                yield Offer(
                    provider="shadeform",
                    region=str(place["region"]),
                    instance_type=f"{kind['cloud']}.{kind['shade_instance_type']}",
                    accelerator=known.accelerator.name,
                    accelerator_count=int(config["num_gpus"]),
                    accelerator_memory_mib=known.memory_mib or 0,
                    vcpus=int(config["vcpus"]),
                    memory_mib=int(config["memory_in_gb"]) * 1024,
                    disk_gib=int(config["storage_in_gb"]),
                    purchase=rental,
                    rate=_rate(kind, place),
                    architecture="arm64" if str(config["gpu_type"]).startswith(_ARM) else "x86_64",
                    source="Shadeform API",
                    as_of=self.account.now().date(),
                )


def _read_error(told: Json) -> tuple[str, str]:
    """Return the code and the message of an error reply. Shadeform does not document the form of
    error replies.
    """
    message = next((told[name] for name in ("message", "error", "detail") if told.get(name)), told)
    return str(told.get("code") or "error"), str(message)


def _identify(kind: Json) -> KnownAccelerator | None:
    config = kind["configuration"]
    return identify(str(config["gpu_type"]), int(config["vram_per_gpu_in_gb"]) * 1024)


def _rate(kind: Json, place: Json) -> HourlyRate:
    """Return the price per hour. The API states the price in dollars for spot instances, and in
    cents for other instances."""
    if place.get("rental_type") == "spot":
        return parse_rate(str(place["hourly_price"]))
    return HourlyRate(int(kind["hourly_price"]) * _MICROS_PER_CENT)


# a machine that is `deleting` is no longer billed
_STATES = vm.StateNames(
    starting="creating pending_provider pending", stopped="error", ended="deleting deleted"
)
_QUIET = ("creating", "pending_provider", "pending", "active")


def _read(told: Json) -> vm.CloudMachine:
    status, address = str(told["status"]), told.get("ip")
    state = _STATES[status]
    details = str(told.get("status_details") or "")
    ended = told.get("deleted_at") if state is vm.MachineState.ENDED else None
    target = vm.SshTarget(address=str(address), port=int(told.get("ssh_port") or 22))
    return vm.CloudMachine(
        id=str(told["id"]),
        name=str(told["name"]),
        state=state,
        address=address or None,
        ssh=target if address else None,
        created_at=datetime.fromisoformat(told["created_at"]),
        ended_at=datetime.fromisoformat(ended) if ended else None,
        preempted=details == "preempted",
        reason="" if status in _QUIET else f"Shadeform reports: {status} {details}".rstrip(),
        waits=f"Shadeform reports: {status} {details}".rstrip()
        if state is vm.MachineState.STARTING
        else "",
    )

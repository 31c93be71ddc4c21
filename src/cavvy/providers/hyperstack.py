"""Hyperstack: each node is one virtual machine that starts the agent on boot.

`HyperstackCloud` calls Hyperstack's API, version 1
(https://docs.hyperstack.cloud/docs/api-reference).

Each machine is created in an environment. An environment belongs to one region and has its own SSH
keys. Cavvy uses a region if the account has an environment with an SSH key in that region.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import NamedTuple

from cavvy.catalog.accelerators import KnownAccelerator, identify
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.tasks import Scalar
from cavvy.domain.units import parse_rate
from cavvy.providers.base import Feature, Refused
from cavvy.providers.settings import project_text
from cavvy.providers.vm import cloud as vm
from cavvy.providers.vm.abilities import make_manifest
from cavvy.providers.vm.account import RestAccount, keep_ours
from cavvy.providers.vm.keys import ApiKeySource
from cavvy.providers.vm.rest import Json

KEYS = ApiKeySource(
    provider="hyperstack",
    variables=("HYPERSTACK_API_KEY",),
    made_at="https://console.hyperstack.cloud/api-keys",
)
_DOCS = "https://docs.hyperstack.cloud/docs"
_API = f"{_DOCS}/api-reference/virtual-machine"

MANIFEST = make_manifest(
    "hyperstack",
    "Hyperstack",
    cloud="cavvy.providers.hyperstack:HyperstackCloud",
    machine="a machine",
    deletion=_API,
    rights="an API key of a user who may manage virtual machines, and list environments, key "
    "pairs, flavors and images",
    unsupported={
        Feature.CAPACITY: "Hyperstack reports how many GPUs of a model are free in a region "
        f"({_DOCS}/api-reference/core-resources/stocks); Cavvy does not read this number yet, but "
        "only whether a flavor is in stock",
        Feature.SELF_END: _API,
        Feature.VOLUMES: f"{_DOCS}/storage/volumes/creating-a-volume/",
        Feature.NETWORK: "machines are in the network of their environment, and the type of the "
        f"network depends on the flavor and the region ({_DOCS}/network/network-types/)",
        Feature.DISK: f"{_DOCS}/hardware/flavors/",
        Feature.NOTICE: _API,
    },
    settings=(
        KEYS.setting(),
        project_text(
            "environments",
            "The account's environments to use, separated by commas. In each region, the "
            "default is the first environment that has an SSH key.",
        ),
        project_text(
            "image",
            "The image of machines, by name. The default is the region's newest Ubuntu image "
            "with CUDA.",
        ),
    ),
    endpoint="https://infrahub-api.nexgencloud.com/v1",
)


# Only the message tells missing stock from a wrong value.
_FULL = re.compile(r"stock|capacity|not available|unavailable", re.IGNORECASE)
_OVER_LIMIT = re.compile(r"quota", re.IGNORECASE)
_SPOT = "-spot"  # suffix of the names of spot flavors, and of their GPUs in the price book
_LIMIT = "quota"  # Cavvy's code for this fault: a quota is exceeded


class Place(NamedTuple):
    """The environment in which Cavvy creates a region's machines, and the environment's SSH key."""

    environment: str
    key: str  # the name of an SSH key of the environment


class HyperstackCloud:
    """Implements `Cloud`."""

    # the API documents the maximum length of names
    traits = vm.CloudTraits(name_limit=50, quota_codes=frozenset({_LIMIT}))

    def __init__(self, settings: Mapping[str, Scalar], now: Callable[[], datetime]) -> None:
        self.account = RestAccount(
            settings,
            now,
            KEYS,
            lambda told: (told.get("error_reason") or "error", told["message"]),
            key_header="api_key",
        )
        self._api = self.account.api

    async def offers(self) -> Sequence[Offer]:
        places = await self._places()
        prices = {str(each["name"]): each["value"] for each in await self._api.get("/pricebook")}
        groups = (await self._api.get("/core/flavors"))["data"]
        # flavors without GPUs are not offered, because the price book has no prices for them
        flavors = [
            each for group in groups for each in group["flavors"] if int(each["gpu_count"]) > 0
        ]
        self.account.note_unknown(
            str(each["gpu"]) for each in flavors if _identify(each["gpu"]) is None
        )
        return [
            self._offer(each, known, str(prices[_price_name(each)]))
            for each in flavors
            if (known := _identify(each["gpu"])) is not None
            if each["stock_available"] and each["region_name"] in places
            if _price_name(each) in prices
        ]

    async def create(self, request: vm.MachineRequest) -> Sequence[str]:
        region = request.offer.region
        place = (await self._places()).get(region)
        if place is None:
            raise Refused(f"[providers.hyperstack]: no environment in {region} has an SSH key")
        body = {
            "name": request.names[0],
            "environment_name": place.environment,
            "key_name": place.key,
            "flavor_name": request.offer.instance_type,
            "image_name": await self._choose_image(region),
            "count": 1,
            "assign_floating_ip": True,  # without it, a machine cannot reach the server
            "user_data": request.user_data[0],
        }
        try:
            told = await self._api.send("POST", "/core/virtual-machines", body)
        except vm.CloudFault as fault:
            raise self.name_limit(fault) from fault
        return [str(each["id"]) for each in told["instances"]]

    async def list(self) -> Sequence[vm.CloudMachine]:
        found = await self._all("/core/virtual-machines", "instances")
        return [_read(each) for each in keep_ours(found)]

    async def get(self, machine: str) -> vm.CloudMachine | None:
        return _read((await self._api.get(f"/core/virtual-machines/{machine}"))["instance"])

    async def delete(self, machine: str) -> None:
        await self._api.send("DELETE", f"/core/virtual-machines/{machine}")

    def is_full(self, fault: vm.CloudFault) -> bool:
        return fault.refuses(_FULL)

    def name_limit(self, fault: vm.CloudFault) -> vm.CloudFault:
        """Return the fault, with the code `_LIMIT` if a quota is exceeded."""
        if _OVER_LIMIT.search(f"{fault.code} {fault.message}"):
            return vm.CloudFault(fault.status, _LIMIT, fault.message)
        return fault

    async def _all(self, path: str, field: str) -> Sequence[Json]:
        def read_next(page: Json) -> str | None:
            number = int(page["page"])
            more = number * int(page["page_size"]) < int(page["count"])
            return f"{path}?pageSize=100&page={number + 1}" if more else None

        pages = await self._api.pages(f"{path}?pageSize=100&page=1", read_next)
        return [each for page in pages for each in page[field]]

    async def _places(self) -> Mapping[str, Place]:
        """Return the environment and the SSH key for each region that can be used."""
        wanted = self.account.names("environments")
        regions = {
            str(each["name"]): str(each["region"])
            for each in await self._all("/core/environments", "environments")
            if not wanted or each["name"] in wanted
        }
        found: dict[str, Place] = {}
        for each in await self._all("/core/keypairs", "keypairs"):
            place = Place(str(each["environment"]["name"]), str(each["name"]))
            region = regions.get(place.environment)
            if region is not None:
                found[region] = min(found.get(region, place), place)
        if not found:
            raise Refused(
                "[providers.hyperstack]: the account has no environment with an SSH key; create "
                "both at https://console.hyperstack.cloud"
            )
        return found

    async def _choose_image(self, region: str) -> str:
        if wanted := str(self.account.settings.get("image") or ""):
            return wanted
        groups = (await self._api.get(f"/core/images?region={region}"))["images"]
        names = [str(each["name"]) for group in groups for each in group["images"]]
        fit = [each for each in names if each.startswith("Ubuntu") and "CUDA" in each]
        if not fit:
            raise Refused(f"[providers.hyperstack] image: {region} has no Ubuntu image with CUDA")
        return max(fit, key=lambda name: ([int(n) for n in re.findall(r"\d+", name)], name))

    def _offer(self, flavor: Json, known: KnownAccelerator, price: str) -> Offer:
        count = int(flavor["gpu_count"])
        return Offer(
            provider="hyperstack",
            region=str(flavor["region_name"]),
            instance_type=str(flavor["name"]),
            accelerator=known.accelerator.name,
            accelerator_count=count,
            accelerator_memory_mib=known.memory_mib or 0,
            vcpus=int(flavor["cpu"]),
            memory_mib=int(float(flavor["ram"]) * 1024),
            disk_gib=int(flavor["disk"]),
            purchase=Purchase.SPOT if _is_spot(flavor) else Purchase.ON_DEMAND,
            rate=parse_rate(Decimal(price) * count),
            architecture="x86_64",
            source="Hyperstack API",
            as_of=self.account.now().date(),
        )


def _is_spot(flavor: Json) -> bool:
    """Return whether Hyperstack can reclaim machines of a flavor such as `n3-RTX-A6000x1-spot`."""
    return str(flavor["name"]).endswith(_SPOT) or str(flavor["gpu"]).endswith(_SPOT)


def _price_name(flavor: Json) -> str:
    """Return the name of the flavor's GPU in the price book, such as `RTX-A6000-spot`."""
    gpu = str(flavor["gpu"]).removesuffix(_SPOT)
    return gpu + _SPOT if _is_spot(flavor) else gpu


def _identify(gpu: str) -> KnownAccelerator | None:
    """Return the accelerator with a name such as "H100-80G-PCIe-NVLink", or None if it is
    unknown."""
    # the catalog has the same name for the GPU with and without NVLink
    return identify(gpu.removesuffix(_SPOT).removesuffix("-NVLink"))


# https://docs.hyperstack.cloud/docs/api-reference/core-resources/virtual-machines
_STATES = vm.StateNames(
    starting="CREATING BUILD", stopped="SHUTOFF HIBERNATED ERROR", ended="DELETING"
)


def _read(told: Json) -> vm.CloudMachine:
    status = str(told["status"])
    created_at = datetime.fromisoformat(told["created_at"])
    return vm.CloudMachine(
        id=str(told["id"]),
        name=str(told["name"]),
        state=_STATES[status],
        address=told.get("fixed_ip") or None,
        created_at=created_at if created_at.tzinfo else created_at.replace(tzinfo=UTC),
        reason="" if status in ("CREATING", "BUILD", "ACTIVE") else f"Hyperstack reports: {status}",
    )

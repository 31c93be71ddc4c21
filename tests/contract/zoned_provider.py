"""A made-up cloud whose API needs what the example in examples/provider does not: several zones,
several calls to create a machine, user data as text, lists whose pages only a header counts, prices
per month in euros, and disks that survive their machine.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from functools import partial

from cavvy.catalog.accelerators import identify
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import Scalar
from cavvy.providers.base import Feature, Provider, ProviderContext
from cavvy.providers.settings import text
from cavvy.providers.vm.abilities import make_manifest
from cavvy.providers.vm.account import RestAccount, join_id, keep_ours, make_provider, split_id
from cavvy.providers.vm.cloud import (
    CloudFault,
    CloudMachine,
    CloudTraits,
    MachineRequest,
    MachineState,
)
from cavvy.providers.vm.keys import ApiKeySource
from cavvy.providers.vm.launch import finish_or_delete
from cavvy.providers.vm.leftovers import LeftoverScripts
from cavvy.providers.vm.regions import list_regions
from cavvy.providers.vm.rest import Json

KEYS = ApiKeySource(
    provider="steppe", variables=("STEPPE_SECRET_KEY",), files=(), made_at="https://steppe.example"
)
MANIFEST = make_manifest(
    "steppe",
    "the Steppe",
    machine="a server",
    deletion="https://steppe.example/api#delete",
    rights="a secret key that may manage instances and volumes",
    unsupported={
        feature: f"the Steppe has no {feature} (https://steppe.example/api)"
        for feature in (
            Feature.SPOT,
            Feature.CAPACITY,
            Feature.SELF_END,
            Feature.VOLUMES,
            Feature.NETWORK,
            Feature.DISK,
            Feature.NOTICE,
        )
    },
    settings=(
        KEYS.setting(),
        text("regions", "The regions to use, separated by commas. The default is all regions."),
    ),
    endpoint="https://api.steppe.example/v1",
    docs="https://steppe.example/cavvy",
    currency="EUR",
    zoned=True,
)
ZONES = ("east-1", "east-2", "west-1")
_MONTH_H = 730  # the hours of a month, as the Steppe's price page counts them
_STATES = {
    "starting": MachineState.STARTING,
    "running": MachineState.RUNNING,
    "stopped": MachineState.STOPPED,
}


def make(context: ProviderContext) -> Provider:
    return make_provider(MANIFEST, context, SteppeCloud)


class SteppeCloud:
    """Implements `Cloud`. A machine's id has the form ZONE/ID."""

    traits = CloudTraits(
        name_limit=63,
        list_lag=timedelta(minutes=1),
        created_off=True,
        quota_codes=frozenset({"quotas_exceeded"}),
    )

    def __init__(self, settings: Mapping[str, Scalar], now: Callable[[], datetime]) -> None:
        self.account = RestAccount(
            settings,
            now,
            KEYS,
            lambda told: (told["type"], told["message"]),
            key_header="X-Auth-Token",
        )
        self._api = self.account.api
        self._zones = [zone for zone in ZONES if self.account.allows(_region(zone))]
        self._leftovers = LeftoverScripts(self._list_volumes, self._drop_volumes, now)

    async def offers(self) -> Sequence[Offer]:
        found = await self.account.ask_zones(self._zones, self._list_products)
        models = {str(each["gpu"]) for _, each in found if each["gpu"]}
        self.account.note_unknown(each for each in models if identify(each) is None)
        return [
            self._offer(zone, each)
            for zone, each in found
            if not each["gpu"] or identify(each["gpu"])
        ]

    async def create(self, request: MachineRequest) -> Sequence[str]:
        zone, name = str(request.offer.zone), request.names[0]
        body = {"name": name, "commercial_type": request.offer.instance_type}
        told = await self._api.send("POST", f"/zones/{zone}/servers", body)
        new = join_id(zone, str(told["id"]))
        path = f"/zones/{zone}/servers/{told['id']}"
        steps = [
            partial(self._api.send, "PATCH", f"{path}/user_data/cloud-init", request.user_data[0]),
            partial(self._api.send, "POST", f"{path}/action", {"action": "poweron"}),
        ]
        return [await finish_or_delete(new, steps, self.delete)]

    async def list(self) -> Sequence[CloudMachine]:
        machines = await list_regions(self._zones, self._list_zone, _region)
        await self._leftovers.sweep([each.name for each in machines])
        return machines

    async def get(self, machine: str) -> CloudMachine | None:
        zone, number = split_id(machine)
        return _read(zone, await self._api.get(f"/zones/{zone}/servers/{number}"))

    async def delete(self, machine: str) -> None:
        zone, number = split_id(machine)
        told = await self._api.send("DELETE", f"/zones/{zone}/servers/{number}")
        await self._drop_volumes([join_id(zone, str(told["volume"]))])

    def is_full(self, fault: CloudFault) -> bool:
        return fault.code == "out_of_stock"

    async def _pages(self, path: str) -> Sequence[Json]:
        pages = await self._api.numbered_pages(f"{path}?page={{page}}")
        return [each for page in pages for each in page]

    async def _list_products(self, zone: str) -> Sequence[tuple[str, Json]]:
        return [(zone, each) for each in await self._pages(f"/zones/{zone}/products")]

    async def _list_zone(self, zone: str) -> Sequence[CloudMachine]:
        found = keep_ours(await self._pages(f"/zones/{zone}/servers"))
        return [_read(zone, each) for each in found]

    async def _list_volumes(self) -> Sequence[Json]:
        found = await asyncio.gather(*(self._pages(f"/zones/{z}/volumes") for z in self._zones))
        return [
            {**each, "id": join_id(zone, str(each["id"]))}
            for zone, volumes in zip(self._zones, found, strict=True)
            for each in volumes
        ]

    async def _drop_volumes(self, volumes: Collection[str]) -> None:
        for zone, number in map(split_id, volumes):
            with suppress(CloudFault):  # the next sweep deletes it
                await self._api.send("DELETE", f"/zones/{zone}/volumes/{number}")

    def _offer(self, zone: str, told: Json) -> Offer:
        known = identify(told["gpu"]) if told["gpu"] else None
        return Offer(
            provider="steppe",
            region=_region(zone),
            zone=zone,
            instance_type=told["name"],
            accelerator=known.accelerator.name if known else None,
            accelerator_count=told["gpus"],
            accelerator_memory_mib=told["gpu_bytes"] // 2**20,
            vcpus=told["cpus"],
            memory_mib=told["ram_bytes"] // 2**20,
            rate=self.account.rate(told["monthly_price"], hours=_MONTH_H),
            architecture="x86_64",
            source="the Steppe's API",
            as_of=self.account.now().date(),
        )


def _region(zone: str) -> str:
    return zone.rpartition("-")[0]


def _read(zone: str, told: Json) -> CloudMachine:
    return CloudMachine(
        id=join_id(zone, str(told["id"])),
        name=told["name"],
        state=_STATES[told["state"]],
        address=told["address"] or None,
        created_at=datetime.fromisoformat(told["creation_date"]),
    )

"""Calls the Prairie's API, version 1."""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta

from cavvy.catalog.accelerators import identify
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import Scalar
from cavvy.providers.vm.account import RestAccount, keep_ours
from cavvy.providers.vm.cloud import (
    CloudFault,
    CloudMachine,
    CloudTraits,
    MachineRequest,
    MachineState,
)
from cavvy.providers.vm.rest import Json
from prairie_provider import KEYS

_STATES = {
    "building": MachineState.STARTING,
    "up": MachineState.RUNNING,
    "off": MachineState.STOPPED,
}


class PrairieCloud:
    """Implements `Cloud`."""

    traits = CloudTraits(
        name_limit=60,
        user_data_limit=65536,
        list_lag=timedelta(minutes=1),
        quota_codes=frozenset({"limit"}),
    )

    def __init__(self, settings: Mapping[str, Scalar], now: Callable[[], datetime]) -> None:
        self.account = RestAccount(settings, now, KEYS, lambda told: (told["code"], told["text"]))
        self._api = self.account.api

    async def offers(self) -> Sequence[Offer]:
        plans = await self._all("/plans", "plans")
        models = {str(each["gpu"]) for each in plans if each["gpu"]}
        self.account.note_unknown(each for each in models if identify(each) is None)
        return [
            self._offer(each)
            for each in plans
            if not each["gpu"] or identify(each["gpu"])
            if self.account.allows(each["region"])
        ]

    async def create(self, request: MachineRequest) -> Sequence[str]:
        body = {
            "name": request.names[0],
            "plan": request.offer.instance_type,
            "region": request.offer.region,
            "script": request.user_data[0],
        }
        if ranch := self.account.settings.get("ranch"):
            body["ranch"] = str(ranch)
        told = await self._api.send("POST", "/servers", body)
        return [str(told["server"]["id"])]

    async def list(self) -> Sequence[CloudMachine]:
        return [_read(each) for each in keep_ours(await self._all("/servers", "servers"))]

    async def get(self, machine: str) -> CloudMachine | None:
        return _read((await self._api.get(f"/servers/{machine}"))["server"])

    async def delete(self, machine: str) -> None:
        # without `disk`, the disk stays and is billed
        await self._api.send("DELETE", f"/servers/{machine}?disk=delete")

    def is_full(self, fault: CloudFault) -> bool:
        return fault.code == "sold_out"

    async def _all(self, path: str, field: str) -> Sequence[Json]:
        pages = await self._api.pages(path, lambda page: page["next"])
        return [each for page in pages for each in page[field]]

    def _offer(self, plan: Json) -> Offer:
        known = identify(plan["gpu"]) if plan["gpu"] else None
        return Offer(
            provider="prairie",
            region=plan["region"],
            instance_type=plan["id"],
            accelerator=known.accelerator.name if known else None,
            accelerator_count=plan["gpus"],
            accelerator_memory_mib=plan["gpu_gib"] * 1024,
            vcpus=plan["cpus"],
            memory_mib=plan["memory_gib"] * 1024,
            disk_gib=plan["disk_gib"],
            rate=self.account.rate(plan["usd_an_hour"]),
            architecture="x86_64",
            source="the Prairie's API",
            as_of=self.account.now().date(),
        )


def _read(told: Json) -> CloudMachine:
    return CloudMachine(
        id=told["id"],
        name=told["name"],
        state=_STATES[told["state"]],
        address=told["address"] or None,
        created_at=datetime.fromisoformat(told["created"]),
    )

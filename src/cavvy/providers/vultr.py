"""Vultr: each node is one instance that starts the agent on boot.

`VultrCloud` calls Vultr's API, version 2 (https://www.vultr.com/api).
"""

import base64
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta

from cavvy.catalog.accelerators import identify
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import Scalar
from cavvy.domain.units import parse_rate
from cavvy.providers.base import Feature, Refused
from cavvy.providers.settings import project_text, regions_setting
from cavvy.providers.vm import cloud as vm
from cavvy.providers.vm.abilities import make_manifest, reach_setting
from cavvy.providers.vm.account import RestAccount, keep_ours
from cavvy.providers.vm.keys import ApiKeySource
from cavvy.providers.vm.rest import Json

KEYS = ApiKeySource(
    provider="vultr",
    variables=("VULTR_API_KEY",),
    files=("~/.vultr-cli.yaml",),
    names=("api-key",),
    made_at="https://my.vultr.com/settings/#settingsapi",
)

_API = "https://www.vultr.com/api"
_DOCS = "https://docs.vultr.com"

MANIFEST = make_manifest(
    "vultr",
    "Vultr",
    cloud="cavvy.providers.vultr:VultrCloud",
    machine="an instance",
    deletion=f"{_API}/#operation/delete-instance",
    rights="an API key of a user who may manage instances; a key has all rights of its user",
    unsupported={
        Feature.SPOT: "Vultr lists prices of preemptible plans, but its API has no field with "
        f"which to request a preemptible instance ({_API}/#operation/create-instance)",
        Feature.CAPACITY: f"{_API}/#operation/list-plans",
        Feature.SELF_END: f"{_DOCS}/support/platform/billing/how-am-i-billed-for-my-servers",
        Feature.VOLUMES: f"{_DOCS}/reference/terraform/resources/block_storage",
        Feature.NETWORK: "instances are not in a VPC, because VPCs are not supported yet "
        f"({_DOCS}/products/network/vpc-networks)",
        Feature.DISK: f"{_API}/#operation/list-plans",
        Feature.NOTICE: _API,
    },
    settings=(
        KEYS.setting(),
        regions_setting("regions"),
        project_text(
            "ssh_keys",
            "The ids of the account's SSH keys that instances accept, separated by commas. By "
            "default, instances accept no key.",
        ),
        project_text(
            "os",
            "The name of the instances' operating system, as in Vultr's list. The system must "
            "support cloud-init.",
            "Ubuntu 24.04 LTS x64",
        ),
        reach_setting(),
    ),
    endpoint="https://api.vultr.com/v2",
)


# Vultr answers every request that it cannot serve with status 400; only the message gives the
# cause.
_FULL = re.compile(r"not available in the selected|more capacity", re.IGNORECASE)
_OVER_LIMIT = re.compile(r"maximum number of .*for this account", re.IGNORECASE)
# Cavvy's code for this fault: the account's limit of instances is reached
_LIMIT = "instance-limit"
_NO_ADDRESS = ("", "0.0.0.0")  # reported until the instance has an address


class VultrCloud:
    """Implements `Cloud`."""

    traits = vm.CloudTraits(quota_codes=frozenset({_LIMIT}))

    def __init__(self, settings: Mapping[str, Scalar], now: Callable[[], datetime]) -> None:
        self.account = RestAccount(
            settings, now, KEYS, lambda told: (told["status"], told["error"])
        )
        self._api = self.account.api
        self._os_id: int | None = None

    async def offers(self) -> Sequence[Offer]:
        told = await self._all("/plans", "plans", "type=all&")
        plans = [each for each in told if each.get("deploy_ondemand") is not False]
        models = {_model(each) for each in plans}
        self.account.note_unknown(each for each in models if each and identify(each) is None)
        return [
            self._offer(plan, gpus, region)
            for plan in plans
            if (gpus := _gpus(plan)) is not None
            for region in plan["locations"]
            if region and self.account.allows(region)
        ]

    async def create(self, request: vm.MachineRequest) -> Sequence[str]:
        body = {
            "region": request.offer.region,
            "plan": request.offer.instance_type,
            "os_id": await self._find_os(),
            "label": request.names[0],
            "user_data": base64.b64encode(request.user_data[0].encode()).decode(),
            "sshkey_id": self.account.names("ssh_keys"),
            "backups": "disabled",
            "activation_email": False,
        }
        try:
            told = await self._api.send("POST", "/instances", body)
        except vm.CloudFault as fault:
            raise self.name_limit(fault) from fault
        return [str(told["instance"]["id"])]

    async def list(self) -> Sequence[vm.CloudMachine]:
        found = await self._all("/instances", "instances")
        return [_read(each) for each in keep_ours(found, "label")]

    async def get(self, machine: str) -> vm.CloudMachine | None:
        return _read((await self._api.get(f"/instances/{machine}"))["instance"])

    async def delete(self, machine: str) -> None:
        await self._api.send("DELETE", f"/instances/{machine}")

    def is_full(self, fault: vm.CloudFault) -> bool:
        return fault.status == 400 and _FULL.search(fault.message) is not None

    def name_limit(self, fault: vm.CloudFault) -> vm.CloudFault:
        """Return the fault, with the code `_LIMIT` if the account's limit of instances is
        reached."""
        if _OVER_LIMIT.search(fault.message):
            return vm.CloudFault(fault.status, _LIMIT, fault.message)
        return fault

    async def _all(self, path: str, field: str, query: str = "") -> Sequence[Json]:
        first = f"{path}?{query}per_page=500"

        def read_next(page: Json) -> str | None:
            cursor = page["meta"]["links"]["next"]
            return f"{first}&cursor={cursor}" if cursor else None

        return [each for page in await self._api.pages(first, read_next) for each in page[field]]

    async def _find_os(self) -> int:
        if self._os_id is None:
            known = {str(each["name"]): int(each["id"]) for each in await self._all("/os", "os")}
            wanted = str(self.account.settings["os"])
            if wanted not in known:
                raise Refused(f"[providers.vultr] os: Vultr has no operating system {wanted!r}")
            self._os_id = known[wanted]
        return self._os_id

    def _offer(self, plan: Json, gpus: int, region: str) -> Offer:
        known = identify(_model(plan)) if gpus else None
        memory_mib = int(plan["gpu_vram_gb"]) * 1024 // gpus if gpus else 0
        # prices of regions that differ from the plan's price
        costs = plan.get("location_cost") or {}
        usd = costs[region]["hourly_cost"] if region in costs else plan["hourly_cost"]
        return Offer(
            provider="vultr",
            region=str(region),
            instance_type=str(plan["id"]),
            accelerator=known.accelerator.name if known else None,
            accelerator_count=gpus,
            accelerator_memory_mib=memory_mib,
            vcpus=int(plan["vcpu_count"]),
            memory_mib=int(plan["ram"]),
            disk_gib=int(plan["disk"]),
            rate=parse_rate(str(usd)),
            # https://docs.vultr.com/support/platform/billing/how-am-i-billed-for-my-servers
            minimum_charge=timedelta(hours=1),
            architecture="x86_64",
            source="Vultr API",
            as_of=self.account.now().date(),
        )


def _model(plan: Json) -> str:
    """Return the GPU's name in the API, such as "NVIDIA_A40", or "" for a plan without GPUs."""
    return str(plan.get("gpu_type") or "")


def _gpus(plan: Json) -> int | None:
    """Return the number of GPUs, computed from their total memory. Returns None if the GPU is
    unknown, or if the plan has a fraction of a GPU.
    """
    if not _model(plan):
        return None if plan["type"] in ("vcg", "vdm") else 0
    known = identify(_model(plan))
    if known is None or not known.accelerator.memory:
        return None
    # if the GPU exists with several memory sizes, Vultr has the largest
    count, rest = divmod(int(plan["gpu_vram_gb"]) * 1024, known.accelerator.memory[-1].mib)
    return count if count and not rest else None


def _read(told: Json) -> vm.CloudMachine:
    status, address = str(told["status"]), str(told["main_ip"])
    state = vm.MachineState.STARTING if status == "pending" else vm.MachineState.RUNNING
    if status == "active" and (told["power_status"], told["server_status"]) == ("stopped", "ok"):
        state = vm.MachineState.STOPPED
    quiet = status in ("pending", "active") and state is not vm.MachineState.STOPPED
    return vm.CloudMachine(
        id=str(told["id"]),
        name=str(told["label"]),
        state=state,
        address=None if address in _NO_ADDRESS else address,
        ssh=None if address in _NO_ADDRESS else vm.SshTarget(address=address),
        created_at=datetime.fromisoformat(told["date_created"]),
        reason="" if quiet else f"Vultr reports: {status}, {told['power_status']}",
    )

"""Lambda Cloud: each node is one on-demand instance that starts the agent on boot.

The module is not named `lambda`, because that is a keyword of Python. `LambdaCloud` calls Lambda's
Cloud API, version 1.10 (https://docs.lambda.ai/api/cloud).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta

from cavvy.catalog.accelerators import KnownAccelerator, identify
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import Scalar
from cavvy.domain.units import HourlyRate
from cavvy.providers.base import Feature, Refused
from cavvy.providers.settings import project_text, regions_setting
from cavvy.providers.vm import cloud as vm
from cavvy.providers.vm.abilities import make_manifest, reach_setting
from cavvy.providers.vm.account import RestAccount, keep_ours
from cavvy.providers.vm.keys import ApiKeySource
from cavvy.providers.vm.rest import Json

KEYS = ApiKeySource(
    provider="lambda",
    variables=("LAMBDA_API_KEY",),
    files=("~/.lambda_cloud/lambda_keys",),
    made_at="https://cloud.lambda.ai/api-keys",
)
_API = "https://docs.lambda.ai/api/cloud"
_DOCS = "https://docs.lambda.ai/public-cloud"

MANIFEST = make_manifest(
    "lambda",
    "Lambda Cloud",
    cloud="cavvy.providers.lambda_cloud:LambdaCloud",
    machine="an instance",
    deletion=f"{_DOCS}/on-demand/creating-managing-instances/",
    rights="an API key of the account; Lambda's API describes no narrower permissions",
    unsupported={
        Feature.SPOT: _API,
        Feature.CAPACITY: _API,
        Feature.SELF_END: f"{_DOCS}/billing",
        Feature.VOLUMES: f"{_DOCS}/filesystems",
        Feature.NETWORK: _API,
        Feature.DISK: _API,
        Feature.NOTICE: _API,
    },
    settings=(
        KEYS.setting(),
        project_text(
            "ssh_key",
            "The name of the account's SSH key that instances accept; Lambda requires a key. The "
            "default is the account's first key.",
        ),
        regions_setting("regions"),
        reach_setting(),
    ),
    endpoint="https://cloud.lambda.ai/api/v1",
)


_ARM = ("GH200", "GB200", "GB300")  # the API does not report the architecture of the CPUs
_MICROS_PER_CENT = 10_000


class LambdaCloud:
    """Implements `Cloud`."""

    # The API documents the limits for names, user data and requests. Billing starts when an
    # instance has passed its health checks and so becomes `active`
    # (https://docs.lambda.ai/public-cloud/billing).
    traits = vm.CloudTraits(
        name_limit=64,
        tags=True,
        launch_every=timedelta(seconds=12),
        user_data_limit=1_000_000,
        bill_starts=vm.BillStart.RUNNING,
        quota_codes=frozenset({"global/quota-exceeded"}),
    )

    def __init__(self, settings: Mapping[str, Scalar], now: Callable[[], datetime]) -> None:
        self.account = RestAccount(
            settings, now, KEYS, lambda told: (told["error"]["code"], told["error"]["message"])
        )
        self._api = self.account.api
        self._key_name = ""

    async def offers(self) -> Sequence[Offer]:
        told = (await self._api.get("/instance-types"))["data"].values()
        self.account.note_unknown(
            str(each["instance_type"]["gpu_description"]) for each in told if not _is_known(each)
        )
        return [
            self._offer(each["instance_type"], region["name"])
            for each in told
            for region in each["regions_with_capacity_available"]
            if _is_known(each) and self.account.allows(str(region["name"]))
        ]

    async def create(self, request: vm.MachineRequest) -> Sequence[str]:
        body = {
            "region_name": request.offer.region,
            "instance_type_name": request.offer.instance_type,
            "ssh_key_names": [await self._ssh_key()],
            "name": request.names[0],
            "user_data": request.user_data[0],
            "tags": [{"key": key, "value": value} for key, value in request.tags.items()],
        }
        try:
            told = await self._api.send("POST", "/instance-operations/launch", body)
        except vm.CloudFault:
            self._key_name = ""  # look the key up again, because it may have been deleted
            raise
        return [str(each) for each in told["data"]["instance_ids"]]

    async def list(self) -> Sequence[vm.CloudMachine]:
        found = (await self._api.get("/instances"))["data"]
        return [_read(each) for each in keep_ours(found)]

    async def get(self, machine: str) -> vm.CloudMachine | None:
        return _read((await self._api.get(f"/instances/{machine}"))["data"])

    async def delete(self, machine: str) -> None:
        body = {"instance_ids": [machine]}
        await self._api.send("POST", "/instance-operations/terminate", body)

    def is_full(self, fault: vm.CloudFault) -> bool:
        return fault.code == "instance-operations/launch/insufficient-capacity"

    def _offer(self, kind: Json, region: str) -> Offer:
        specs, text = kind["specs"], str(kind["gpu_description"])
        count = int(specs["gpus"])
        known = _identify(text) if count else None
        name, memory = (known.accelerator.name, known.memory_mib or 0) if known else (None, 0)
        return Offer(
            provider="lambda",
            region=str(region),
            instance_type=str(kind["name"]),
            accelerator=name,
            accelerator_count=count,
            accelerator_memory_mib=memory,
            vcpus=int(specs["vcpus"]),
            memory_mib=int(specs["memory_gib"]) * 1024,
            disk_gib=int(specs["storage_gib"]),
            rate=HourlyRate(int(kind["price_cents_per_hour"]) * _MICROS_PER_CENT),
            minimum_charge=timedelta(minutes=1),
            architecture="arm64" if _model(text) in _ARM else "x86_64",
            source="Lambda Cloud API",
            as_of=self.account.now().date(),
        )

    async def _ssh_key(self) -> str:
        if not self._key_name:
            names = [str(each["name"]) for each in (await self._api.get("/ssh-keys"))["data"]]
            wanted = str(self.account.settings.get("ssh_key") or (names[0] if names else ""))
            if wanted not in names:
                which = f"no SSH key named {wanted!r}" if wanted else "no SSH key"
                raise Refused(
                    f"[providers.lambda] ssh_key: the account has {which}; add one at "
                    "https://cloud.lambda.ai/ssh-keys"
                )
            self._key_name = wanted
        return self._key_name


def _model(text: str) -> str:
    """Return the GPU's name in a description: "A10" for "A10 (24 GB PCIe)"."""
    return text.split(" (")[0]


def _identify(text: str) -> KnownAccelerator | None:
    """Return the accelerator in a description such as "A10 (24 GB PCIe)", or None if the catalog
    does not contain the accelerator.
    """
    size = re.search(r"\((\d+) GB", text)
    memory_mib = int(size[1]) * 1024 if size else None
    return identify(text, memory_mib) or identify(_model(text), memory_mib)


def _is_known(told: Json) -> bool:
    """Return whether the instance type has no accelerator, or an accelerator that is in the
    catalog."""
    kind = told["instance_type"]
    return int(kind["specs"]["gpus"]) == 0 or _identify(str(kind["gpu_description"])) is not None


# the API's `InstanceStatus`
_STATES = vm.StateNames(starting="booting", ended="terminating terminated preempted")


def _read(told: Json) -> vm.CloudMachine:
    status = str(told["status"])
    return vm.CloudMachine(
        id=str(told["id"]),
        name=str(told.get("name") or ""),
        state=_STATES[status],
        address=told.get("private_ip") or told.get("ip"),
        ssh=vm.SshTarget(address=str(told["ip"])) if told.get("ip") else None,
        tags={str(each["key"]): str(each["value"]) for each in told.get("tags") or ()},
        preempted=status == "preempted",
        reason="" if status in ("booting", "active") else f"Lambda reports: {status}",
    )

"""Paperspace: each node is one machine that starts the agent on its first boot.

`PaperspaceCloud` calls Paperspace's API, version 1
(https://docs.digitalocean.com/reference/paperspace/api-reference).

The API reports neither prices nor the sizes of machine types. Prices and sizes come from the
catalog, whose instance types have the names of Paperspace's machine types. The API stores the
script that a machine runs on its first boot as a separate object. Cavvy creates the script before
the machine, and deletes it together with the machine.
"""

import asyncio
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from urllib.parse import quote

from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.values import replace
from cavvy.providers.base import Feature, ProviderContext, Refused
from cavvy.providers.settings import project_number, project_text
from cavvy.providers.vm import cloud as vm
from cavvy.providers.vm.abilities import make_manifest, reach_setting
from cavvy.providers.vm.account import RestAccount, keep_ours
from cavvy.providers.vm.keys import ApiKeySource
from cavvy.providers.vm.leftovers import LeftoverScripts
from cavvy.providers.vm.rest import Json

KEYS = ApiKeySource(
    provider="paperspace",
    variables=("PAPERSPACE_API_KEY",),
    made_at="https://console.paperspace.com/settings/apikeys",
)
_API = "https://docs.digitalocean.com/reference/paperspace/api-reference"

MANIFEST = make_manifest(
    "paperspace",
    "Paperspace",
    cloud="cavvy.providers.paperspace:PaperspaceCloud",
    layer="cavvy.providers.vm.provider:make_provider",
    machine="a machine",
    deletion="https://docs.digitalocean.com/products/paperspace/machines/how-to/deactivate/",
    rights="an API key of the team; Paperspace describes no narrower permissions",
    unsupported={
        Feature.SPOT: f"Paperspace sells machines on demand only ({_API}/machine)",
        Feature.CAPACITY: "Paperspace reports which templates run on a machine type, but not "
        f"whether machines are free ({_API}/os-templates)",
        Feature.SELF_END: "Paperspace bills the disk of a machine until the API deletes the disk "
        f"({_API}/machine), and nodes get no API key, because a key may delete all machines of "
        "the team; the server deletes machines that are off",
        Feature.VOLUMES: "https://docs.digitalocean.com/reference/paperspace/pspace/commands/"
        "shared-drive",
        Feature.NETWORK: f"the API does not report the speed of the network ({_API}/machine)",
        Feature.DISK: "all disks have the size of the setting `disk_gb`; a size for one task is "
        f"not supported yet ({_API}/machine)",
        Feature.NOTICE: f"{_API}/machine-events",
    },
    settings=(
        KEYS.setting(),
        project_text(
            "template",
            "The id of the template of machines, such as tkni3aa4. By default, machines "
            "with GPUs boot ML-in-a-Box, and other machines boot the newest Ubuntu template that "
            "Paperspace lists for their type.",
        ).for_setup(),
        project_text(
            "network",
            "The id of the private network that machines join. The network must be in NY2. Jobs "
            "with several nodes need a private network, because machines outside a private network "
            "cannot reach each other. By default, machines are in no private network.",
        ),
        project_number(
            "disk_gb",
            "The size of the disk of a machine, rounded up to 50, 100, 250, 500, 1000 or 2000 "
            "GB. Paperspace bills disks separately from machines.",
            unit="GB",
            default=100,
            minimum=50,
            whole=True,
        ),
        reach_setting(),
    ),
    endpoint="https://api.paperspace.com/v1",
)


_REGIONS = {"us-ny2": "ny2"}  # the catalog's name of a region -> the API's name
_DISKS_GB = (50, 100, 250, 500, 1000, 2000)
_NVLINK = ("H100x8",)  # types that need the option for NVLink
_GPU_TEMPLATE = "ML-in-a-Box"  # contains drivers for GPUs
# Paperspace's documentation does not list errors; only the message gives the cause.
_FULL = re.compile(r"capacity|not (currently )?available|unavailable", re.IGNORECASE)
_OVER_LIMIT = re.compile(r"\b(limit|quota|approv\w+)\b", re.IGNORECASE)
_BUSY = re.compile(r"currently|in progress", re.IGNORECASE)
_LIMIT = "limit"  # Cavvy's code for this fault: a limit of the team, or a type without approval
_SHELL, _BASH = "#!/bin/sh\n", "#!/bin/bash\n"


class PaperspaceCloud:
    """Implements `Cloud`."""

    # Scripts are for bash and may have 16 KB (https://docs.paperspace.com/core/api-reference/
    # scripts).
    traits = vm.CloudTraits(user_data_limit=16_000, quota_codes=frozenset({_LIMIT}))

    def __init__(self, context: ProviderContext) -> None:
        settings, now = context.settings, context.now
        self.account = RestAccount(
            settings, now, KEYS, lambda told: (told["code"], told["message"])
        )
        self._api, self._list_prices = self.account.api, context.list_prices
        self.identity, self.close = self.account.identity, self.account.close
        self._templates: Mapping[str, str] = {}  # machine type -> template
        # machine -> its scripts, for machines whose scripts this process has created or listed. For
        # any other machine, all scripts must be listed.
        self._scripts: dict[str, Sequence[str]] = {}
        self._leftovers = LeftoverScripts(
            lambda: self._all("/startup-scripts"), self._drop_scripts, now
        )

    async def offers(self) -> Sequence[Offer]:
        prices = await asyncio.to_thread(self._list_prices, "paperspace")
        sold = [
            each
            for each in prices
            if each.region in _REGIONS and each.purchase is Purchase.ON_DEMAND
        ]
        templates = await self._read_templates()
        chosen = {each.instance_type: _choose(templates, each) for each in sold}
        self._templates = {kind: found for kind, found in chosen.items() if found}
        disk_gib = self._disk_gb() * 10**9 // 2**30
        return [
            replace(each, disk_gib=disk_gib, architecture="x86_64")
            for each in sold
            if each.instance_type in self._templates
        ]

    async def create(self, request: vm.MachineRequest) -> Sequence[str]:
        name, kind = request.names[0], request.offer.instance_type
        network = str(self.account.settings.get("network") or "")
        if request.gang.nodes > 1 and not network:
            raise Refused(
                "[providers.paperspace] network: not set; machines outside a private network "
                "cannot reach each other, so jobs with several nodes need a private network"
            )
        body = {
            "name": name,
            "machineType": kind,
            "templateId": await self._template_of(kind),
            **({"networkId": network} if network else {}),
            "diskSize": self._disk_gb(),
            "region": _REGIONS.get(request.offer.region, request.offer.region),
            # a machine without a public address still reaches the server
            "publicIpType": "dynamic" if request.public_key else "none",
            "autoSnapshotEnabled": False,
            "autoShutdownEnabled": False,
            "takeInitialSnapshot": False,
            "emailPassword": False,
            "startOnCreate": True,
            **({"enableNvlink": True} if kind in _NVLINK else {}),
        }
        script = {
            "name": name,
            "script": _BASH + request.user_data[0].removeprefix(_SHELL),
            "isRunOnce": True,
        }
        made = str((await self._api.send("POST", "/startup-scripts", script))["id"])
        try:
            told = await self._api.send("POST", "/machines", body | {"startupScriptId": made})
        except vm.CloudFault as fault:
            if not fault.uncertain:  # else the machine may exist and needs its script
                await self._drop_scripts([made])
            raise self.name_limit(fault) from fault
        return [self._note_script(str(told["data"]["id"]), made)]

    async def list(self) -> Sequence[vm.CloudMachine]:
        found = keep_ours(await self._all("/machines"))
        with suppress(vm.CloudFault):  # the next sweep tries again
            await self._leftovers.sweep({str(each["name"]) for each in found})
        return [_read(each) for each in found]

    async def get(self, machine: str) -> vm.CloudMachine | None:
        return _read(await self._api.get(f"/machines/{machine}"))

    async def delete(self, machine: str) -> None:
        scripts: Sequence[str] = ()
        with suppress(vm.CloudFault):  # the sweep finds scripts that remain
            scripts = await self._scripts_of(machine)
        try:
            await self._api.send("DELETE", f"/machines/{machine}")
        except vm.CloudFault as fault:
            busy = fault.refuses(_BUSY)
            # deleting the machine later will succeed
            raise (vm.CloudFault(409, fault.code, fault.message) if busy else fault) from fault
        await self._drop_scripts(scripts)
        self._scripts[machine] = ()

    def is_full(self, fault: vm.CloudFault) -> bool:
        return fault.refuses(_FULL)

    def name_limit(self, fault: vm.CloudFault) -> vm.CloudFault:
        """Return the fault, with the code `_LIMIT` if a limit of the team prevents the creation of
        the machine.
        """
        if 400 <= fault.status < 429 and _OVER_LIMIT.search(fault.message):
            return vm.CloudFault(fault.status, _LIMIT, fault.message)
        return fault

    async def _all(self, path: str) -> Sequence[Json]:
        first = f"{path}?limit=120"

        def read_next(page: Json) -> str | None:
            return f"{first}&after={quote(str(page['nextPage']))}" if page["hasMore"] else None

        return [each for page in await self._api.pages(first, read_next) for each in page["items"]]

    async def _read_templates(self) -> Sequence[Json]:
        """Return the templates from which machines can boot: the template in the setting `template`
        or, if this setting is unset, Paperspace's Ubuntu templates. The method always requests the
        team's own templates, because Paperspace checks the API key only in that request.
        """
        own, public = await self._all("/custom-templates"), await self._all("/os-templates")
        wanted = str(self.account.settings.get("template") or "")
        if not wanted:
            return [each for each in public if "Ubuntu" in _title(each)]
        found = [each for each in [*own, *public] if each["id"] == wanted]
        if not found:
            raise Refused(f"[providers.paperspace] template: Paperspace lists no template {wanted}")
        return found

    async def _template_of(self, kind: str) -> str:
        if kind not in self._templates:
            await self.offers()
        if kind not in self._templates:
            raise Refused(
                f"[providers.paperspace] template: Paperspace lists no Ubuntu template for {kind}; "
                "name a template in this setting"
            )
        return self._templates[kind]

    def _disk_gb(self) -> int:
        """Return the smallest available disk size that is not below the setting `disk_gb`. Raises
        Refused.
        """
        wanted = int(self.account.settings["disk_gb"])
        if wanted > _DISKS_GB[-1]:
            raise Refused(
                f"[providers.paperspace] disk_gb: {wanted} is too large; Paperspace's largest disk "
                f"has {_DISKS_GB[-1]} GB"
            )
        return next(each for each in _DISKS_GB if each >= wanted)

    async def _scripts_of(self, machine: str) -> Sequence[str]:
        """Return the ids of the scripts that Cavvy created for a machine."""
        if machine not in self._scripts:
            found: dict[str, list[str]] = {machine: []}
            for each in keep_ours(await self._all("/startup-scripts")):
                for owner in each["assignedMachineIds"]:
                    found.setdefault(owner, []).append(str(each["id"]))
            self._scripts = {**found, **self._scripts}
        return self._scripts[machine]

    def _note_script(self, machine: str, script: str) -> str:
        self._scripts[machine] = [script]
        return machine

    async def _drop_scripts(self, scripts: Collection[str]) -> None:
        for script in scripts:
            with suppress(vm.CloudFault):
                await self._api.send("DELETE", f"/startup-scripts/{script}")


def _choose(templates: Sequence[Json], offer: Offer) -> str:
    """Return the id of the template for an offer, or "" if no template fits. For machines with
    GPUs, a template with drivers is preferred; for other machines, a template without drivers.
    """
    fit = [each for each in templates if _runs(each, offer.instance_type)]

    def rank(template: Json) -> tuple[bool, bool, Sequence[int], str]:
        title = _title(template)
        drivers = (_GPU_TEMPLATE in title) == bool(offer.accelerator)
        version = re.search(r"Ubuntu (\d+)\.(\d+)", title)
        numbers = [int(each) for each in version.groups()] if version else []
        return drivers, "Desktop" not in str(template["agentType"]), numbers, title

    return str(max(fit, key=rank)["id"]) if fit else ""


def _runs(template: Json, kind: str) -> bool:
    return any(
        each["isAvailable"] and each["machineTypeLabel"] == kind
        for each in template["availableMachineTypes"]
    )


def _title(template: Json) -> str:
    return f"{template['name']} {template['operatingSystemLabel']}"


# https://docs.digitalocean.com/products/paperspace/machines/reference/states-and-error-codes:
# only a machine that is off is not billed by the hour
_STATES = vm.StateNames(starting="provisioning starting", stopped="off")
_QUIET = ("provisioning", "starting", "ready", "serviceready")


def _read(told: Json) -> vm.CloudMachine:
    status, public = str(told["state"]), told.get("publicIp")
    ended = told.get("dtDeleted")
    state = _STATES[status]
    return vm.CloudMachine(
        id=str(told["id"]),
        name=str(told["name"]),
        state=vm.MachineState.ENDED if ended else state,
        address=told.get("privateIp") or public or None,
        ssh=vm.SshTarget(address=str(public)) if public else None,
        created_at=datetime.fromisoformat(told["dtCreated"]),
        ended_at=datetime.fromisoformat(ended) if ended else None,
        reason="" if status in _QUIET else f"Paperspace reports: {status}",
    )

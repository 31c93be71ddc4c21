"""JarvisLabs: each node is one container, on which the server starts the agent by SSH.

`JarvislabsCloud` calls JarvisLabs's API. JarvisLabs documents a Python package but no REST API, so
this module makes the same calls as the package `jarvislabs` 0.2.19
(https://docs.jarvislabs.ai/sdk).
"""

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

from cavvy.catalog.accelerators import KnownAccelerator, identify
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.tasks import Scalar
from cavvy.domain.units import HourlyRate
from cavvy.providers.base import Feature, Refused
from cavvy.providers.settings import disk_setting, project_text
from cavvy.providers.vm import cloud as vm
from cavvy.providers.vm.abilities import make_manifest
from cavvy.providers.vm.account import RestAccount
from cavvy.providers.vm.keys import ApiKeySource
from cavvy.providers.vm.rest import Json, RestClient

KEYS = ApiKeySource(
    provider="jarvislabs",
    variables=("JL_API_KEY",),
    files=("~/.config/jl/config.toml",),
    names=("token",),
    made_at="https://jarvislabs.ai/settings/api-keys",
)
_DOCS = "https://docs.jarvislabs.ai/cli"
_CONTAINER = f"an instance is a container of one of JarvisLabs's templates ({_DOCS})"

MANIFEST = make_manifest(
    "jarvislabs",
    "JarvisLabs",
    cloud="cavvy.providers.jarvislabs:JarvislabsCloud",
    machine="an instance",
    deletion=_DOCS,
    rights="an API key of the account; JarvisLabs describes no narrower permissions",
    unsupported={
        Feature.GANG: "JarvisLabs's containers cannot join a private network; only its virtual "
        "machines can (https://docs.jarvislabs.ai/sdk)",
        Feature.IMAGE: f"{_CONTAINER}; the setting `template` selects one for all instances",
        Feature.BUILD: _CONTAINER,
        Feature.LOGIN: _CONTAINER,
        Feature.SELF_END: "JarvisLabs bills an instance's disk until the API destroys the instance "
        f"({_DOCS}), and instances get no API key; the server destroys paused instances",
        Feature.VOLUMES: _DOCS,
        Feature.MOUNTS: "an instance is a container without access to folders of its host or to "
        f"NFS ({_DOCS})",
        Feature.NETWORK: _DOCS,
        Feature.DISK: "the setting `disk_gib` selects the size of the disk for all instances; a "
        f"size for one task is not supported yet ({_DOCS})",
        Feature.NOTICE: "JarvisLabs describes no notice before it pauses a spot instance "
        f"({_DOCS})",
    },
    settings=(
        KEYS.setting(),
        project_text(
            "regions",
            "The regions to use, separated by commas: `india-chennai-01`, `india-noida-01`, "
            "`europe-01`. The default is all regions.",
        ).for_setup(),
        project_text(
            "template",
            "The template of instances, by its id in the list that `jl templates` prints.",
            "pytorch",
        ).for_setup(),
        disk_setting("The size of an instance's disk.", 100, minimum=1, unit="GB"),
    ),
    endpoint="https://backend{region}.jarvislabs.net",
    endpoint_consequence="The addresses of the API. `{region}` stands for the letters of the "
    "region: `c`, `n` or `eu`.",
)


# Each region has its own API address. The first region answers the calls that concern no particular
# region.
_REGIONS = {"india-noida-01": "n", "india-chennai-01": "c", "europe-01": "eu"}
_ONE_GPU = "europe-01"  # the region in which instances have one GPU
_COUNTS = (1, 2, 4, 8)  # numbers of GPUs that are offered
_PAUSED = ("Pausing", "Paused")
# How the API reports missing GPUs is an assumption: these are the words that the package uses when
# it refuses a request itself.
# Only the message tells missing GPUs from a wrong value.
_FULL = re.compile(r"no free|not available|capacity|unavailable", re.IGNORECASE)
_BALANCE = re.compile(r"balance", re.IGNORECASE)
_NO_FUNDS = "insufficient-balance"  # our code
_VIRTUAL_MACHINE = "vm"  # the template of virtual machines, which have endpoints of their own
_KEY_NAME = "cavvy"  # the name of the server's SSH key in the account


class JarvislabsCloud:
    """Implements `Cloud`. An instance type is a number of GPUs and JarvisLabs's name
    of the GPU, such as "2x_A100-80GB".
    """

    # the package has this limit for names
    traits = vm.CloudTraits(name_limit=40, reach=vm.Reach.SSH)

    def __init__(self, settings: Mapping[str, Scalar], now: Callable[[], datetime]) -> None:
        pattern = str(settings["endpoint"])
        first, *others = (pattern.replace("{region}", letters) for letters in _REGIONS.values())
        clients = [RestClient(each, lambda: KEYS.read(settings), _read_error) for each in others]
        self.account = RestAccount(
            {**settings, "endpoint": first}, now, KEYS, _read_error, others=clients
        )
        self._api = self.account.api
        self._apis = dict(zip(_REGIONS, (self._api, *clients), strict=True))

    async def offers(self) -> Sequence[Offer]:
        self._template()
        if _succeeded(await self._api.get("/misc/")):  # the account pays in rupees
            raise Refused(
                "[providers.jarvislabs]: the account is billed in Indian rupees, and Cavvy reads "
                "prices in US dollars only"
            )
        found: list[Offer] = []
        unknown: set[str] = set()
        for row in (await self._api.get("/misc/server_meta"))["server_meta"]:
            if row.get("workload_type") == "vm" or row["region"] not in _REGIONS:
                continue
            known = _identify(row)
            if known is None or not known.memory_mib:
                unknown.add(str(row["gpu_type"]))
            elif self.account.allows(row["region"]):
                found += self._read_row(row, known)
        self.account.note_unknown(unknown)
        return found

    async def create(self, request: vm.MachineRequest) -> Sequence[str]:
        template, offer = self._template(), request.offer
        await self._add_key(request.public_key)
        count, _, gpu = offer.instance_type.partition("x_")
        api = self._apis.get(offer.region)
        if api is None or not count.isdecimal():
            raise vm.CloudFault(
                400, "unknown instance type", f"{offer.instance_type} {offer.region}"
            )
        body = {
            "gpu_type": gpu,
            "num_gpus": int(count),
            "hdd": self.account.settings["disk_gib"],
            "region": offer.region,
            "name": request.names[0],
            "is_spot": offer.purchase is Purchase.SPOT,
            "duration": "hour",
            "disk_type": "ssd",
            "http_ports": "",
            "script_id": None,
            "script_args": "",
            "fs_id": None,
            "arguments": "",
        }
        try:
            told = await api.send("POST", f"/templates/{template}/create", body)
        except vm.CloudFault as fault:
            raise name_balance(fault) from fault
        if not told.get("machine_id"):
            raise name_balance(vm.CloudFault(400, *_read_error(told)))
        return [str(told["machine_id"])]

    async def list(self) -> Sequence[vm.CloudMachine]:
        told = await self._api.get("/users/fetch")
        if not _succeeded(told):
            raise vm.CloudFault(502, *_read_error(told))
        found = told.get("instances") or []
        # the account's other instances may have another form
        return [_read(each) for each in found if _name(each).startswith(vm.NAME_PREFIX)]

    async def get(self, machine: str) -> vm.CloudMachine | None:
        told = await self._fetch(machine)
        return _read(told) if told else None

    async def delete(self, machine: str) -> None:
        """Destroy the instance. If the region is unknown because the instance is not listed yet,
        the request is sent to each region.
        """
        told = await self._fetch(machine) or {}
        region = str(told.get("region") or "")
        apis = [self._apis[region]] if region in self._apis else [*self._apis.values()]
        # as in `_lifecycle_endpoint` of the package
        virtual = str(told.get("template") or told.get("framework") or "") == _VIRTUAL_MACHINE
        path = "/templates/vm/destroy" if virtual else "/misc/destroy"
        fault = vm.CloudFault(404, "not found", f"no instance {machine}")
        for api in apis:
            try:
                done = await api.send("POST", f"{path}?machine_id={machine}")
            except vm.CloudFault as error:
                fault = fault if fault.uncertain else error
                continue
            if _succeeded(done):
                return
            if told:  # such as an instance that cannot be destroyed while it is being made
                fault = vm.CloudFault(409, *_read_error(done))
        raise fault

    def is_full(self, fault: vm.CloudFault) -> bool:
        return fault.refuses(_FULL)

    def _template(self) -> str:
        """Return the template that instances are created from. Raises Refused if the template
        creates virtual machines.
        """
        template = str(self.account.settings["template"])
        if template == _VIRTUAL_MACHINE:
            raise Refused(
                "[providers.jarvislabs] template: the template `vm` creates virtual machines, but "
                "Cavvy rents only containers; set the id of another template, such as `pytorch`"
            )
        return template

    async def _fetch(self, machine: str) -> Json | None:
        """Return the instance as the API describes it, or None if it does not exist."""
        told = await self._api.get(f"/users/fetch/{machine}")
        return (told.get("instance") or None) if _succeeded(told) else None

    async def _add_key(self, key: str) -> None:
        """Add the server's public key to the account unless the account has the key: new instances
        accept all keys of the account. The keys are read before each launch, because an instance
        without the key could never be reached.
        """
        if key in {str(each["ssh_key"]).strip() for each in await self._api.get("/ssh/")}:
            return
        told = await self._api.send("POST", "/ssh/", {"ssh_key": key, "key_name": _KEY_NAME})
        if not _succeeded(told):
            raise vm.CloudFault(400, *_read_error(told))

    def _read_row(self, row: Json, known: KnownAccelerator) -> Sequence[Offer]:
        """Return the offers of one kind of GPU in one region."""
        free = int(row.get("num_free_devices") or 0)
        kinds = (
            (Purchase.ON_DEMAND, "price_per_hour", "effective_num_free_devices"),
            (Purchase.SPOT, "spot_price", "spot_num_free_devices"),
        )
        found = []
        for purchase, price, devices in kinds:
            left = free if row.get(devices) is None else int(row[devices])
            counts = (1,) if row["region"] == _ONE_GPU else _COUNTS
            if row.get(price) is not None:
                rate = HourlyRate(round(float(row[price]) * 1_000_000))
                found += [
                    self._offer(row, known, count, purchase, rate, left)
                    for count in counts
                    if left >= count
                ]
        return found

    def _offer(
        self,
        row: Json,
        known: KnownAccelerator,
        count: int,
        purchase: Purchase,
        rate: HourlyRate,
        left: int,
    ) -> Offer:
        return Offer(
            provider="jarvislabs",
            region=str(row["region"]),
            instance_type=f"{count}x_{row['gpu_type']}",
            accelerator=known.accelerator.name,
            accelerator_count=count,
            accelerator_memory_mib=known.memory_mib or 0,
            vcpus=int(row.get("cpus_per_gpu") or 0) * count,
            memory_mib=int(row.get("ram_per_gpu") or 0) * count * 1024,
            disk_gib=int(self.account.settings["disk_gib"]),
            purchase=purchase,
            rate=rate.times(count),
            capacity=left // count,
            pool=str(row["gpu_type"]),
            architecture="x86_64",
            source="JarvisLabs API",
            as_of=self.account.now().date(),
        )


def name_balance(fault: vm.CloudFault) -> vm.CloudFault:
    """Return the fault, with the code `_NO_FUNDS` if the account's balance is too small."""
    if fault.status in (400, 402, 403) and _BALANCE.search(fault.message):
        return vm.CloudFault(402, _NO_FUNDS, fault.message)
    return fault


def _succeeded(told: Json) -> bool:
    """Return whether a reply reports success. In some replies, the API writes booleans as strings,
    or misspells the field `success` as `sucess`.
    """
    value = told.get("success") or told.get("sucess")
    return value.lower() == "true" if isinstance(value, str) else bool(value)


def _read_error(told: Json) -> tuple[str, str]:
    found = next((told[name] for name in ("message", "error", "detail") if told.get(name)), "")
    return "error", str(found)


def _identify(row: Json) -> KnownAccelerator | None:
    gigabytes = re.sub(r"\D", "", str(row.get("vram") or ""))
    return identify(str(row["gpu_type"]), int(gigabytes) * 1024 if gigabytes else None)


def _name(told: Json) -> str:
    return str(told.get("instance_name") or told.get("name") or "")


_STATES = vm.StateNames(
    starting="Creating Resuming", stopped="Pausing Paused Failed", ended="Destroying"
)


def _read(told: Json) -> vm.CloudMachine:
    status = str(told["status"])
    command = str(told.get("ssh_str") or told.get("ssh_command") or "")
    running = status == "Running"
    return vm.CloudMachine(
        id=str(told["machine_id"]),
        name=_name(told),
        state=_STATES[status],
        ssh=_read_target(command) if running and command else None,
        preempted=bool(told.get("is_spot")) and status in _PAUSED,
        reason="" if status in ("Creating", "Running") else f"JarvisLabs reports: {status}",
    )


def _read_target(command: str) -> vm.SshTarget:
    """Parse the SSH address in a command such as "ssh -o Name=value -p 11014 root@host"."""
    words = shlex.split(command)
    user, _, address = words[-1].rpartition("@")
    port = int(words[words.index("-p") + 1]) if "-p" in words else 22
    return vm.SshTarget(address=address, port=port, user=user or "root")

"""Vast.ai: each node is one container, on which the server starts the agent by SSH.

`VastCloud` calls Vast.ai's REST API (https://docs.vast.ai/api-reference). Version 1 of the API
lists instances, because accounts created after 2 June 2026 cannot list instances with version 0.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from urllib.parse import quote

from cavvy.catalog.accelerators import KnownAccelerator, identify
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.tasks import Scalar
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import Struct
from cavvy.providers.base import Feature
from cavvy.providers.settings import (
    disk_setting,
    host_settings,
    project_flag,
    project_number,
    project_text,
)
from cavvy.providers.vm import cloud as vm
from cavvy.providers.vm.abilities import make_manifest
from cavvy.providers.vm.account import RestAccount, keep_ours
from cavvy.providers.vm.keys import ApiKeySource
from cavvy.providers.vm.rest import Json, RestClient

KEYS = ApiKeySource(
    provider="vast",
    variables=("VAST_API_KEY",),
    files=("~/.config/vastai/vast_api_key", "~/.vast_api_key"),
    names=("vast_api_key",),
    made_at="https://cloud.vast.ai/manage-keys/",
)
_CONTAINER = (
    "an instance is a container, and Vast.ai supports no containers inside it "
    "(https://docs.vast.ai/guides/instances/manage-instances)"
)

MANIFEST = make_manifest(
    "vast",
    "Vast.ai",
    cloud="cavvy.providers.vast:VastCloud",
    machine="an instance",
    deletion="https://docs.vast.ai/guides/instances/manage-instances",
    rights="an API key with the permissions misc, instance_read and instance_write",
    unsupported={
        Feature.GANG: "instances share no network: each instance has a few ports of a public "
        "address that several instances share "
        "(https://docs.vast.ai/guides/instances/connect/networking)",
        Feature.IMAGE: f"{_CONTAINER}; the setting `image` selects the image of all instances",
        Feature.BUILD: _CONTAINER,
        Feature.LOGIN: f"{_CONTAINER}; the image of the setting `image` must be public",
        Feature.CAPACITY: "the offers of one computer overlap: a computer with 8 GPUs is also "
        "offered with 1, 2 and 4 GPUs (https://docs.vast.ai/api-reference/search/search-offers)",
        Feature.SELF_END: "the server deletes instances that have stopped, because Vast.ai bills "
        "the disk of an instance until the instance is deleted "
        "(https://docs.vast.ai/guides/instances/pricing)",
        Feature.VOLUMES: "Vast.ai's volumes belong to one computer "
        "(https://docs.vast.ai/guides/instances/storage/volumes); copy data from and to a bucket "
        "instead",
        Feature.MOUNTS: "an instance is a container without access to folders of its host or to "
        "NFS (https://docs.vast.ai/guides/reference/faq/security)",
        Feature.NETWORK: "instances share no network "
        "(https://docs.vast.ai/guides/instances/connect/networking)",
        Feature.DISK: "the setting `disk_gib` selects the size of the disk for all instances; a "
        "size for one task is not supported yet "
        "(https://docs.vast.ai/api-reference/instances/create-instance)",
        Feature.NOTICE: "Vast.ai describes no notice before an interruptible instance is paused "
        "(https://docs.vast.ai/guides/instances/choosing/instance-types)",
    },
    settings=(
        KEYS.setting(),
        project_text(
            "regions",
            "The countries to use, as two-letter codes separated by commas, such as `US, SE`. The "
            "default is all countries.",
        ).for_setup(),
        project_flag(
            "community",
            "Also use computers outside of data centers. The owners of these computers can read "
            "and change everything that runs on them: data, code and secrets. By default, only "
            "computers that Vast.ai lists as being in data centers are used.",
        ),
        project_text(
            "image",
            "The public image of instances. Vast.ai starts an SSH server in the container instead "
            "of the image's own program.",
            "vastai/base-image:@vastai-automatic-tag",
        ),
        project_text(
            "cuda",
            'The lowest CUDA version that the driver of a computer must support, such as "12.8". '
            "If this is empty, any computer is used.",
        ),
        disk_setting("The size of an instance's disk.", 50, minimum=8, unit="GB"),
        *host_settings("computers"),
        project_number(
            "bid_percent",
            "The bid for an interruptible instance, in percent of the lowest bid that Vast.ai "
            "accepts at the start. Users who bid more get the GPUs, so an instance with a "
            "higher bid is interrupted less often and costs more.",
            unit="percent",
            default=110,
            minimum=100,
            whole=True,
        ),
    ),
    endpoint="https://console.vast.ai/api",
)


# The values of `actual_status` (https://docs.vast.ai/cli/reference/show-instances). The status is
# null while the instance is being made. Vast.ai could start a paused instance again, so a paused
# instance counts as stopped, and the layer `vm` deletes it.
_STATES = {
    None: vm.MachineState.STARTING,
    "created": vm.MachineState.STARTING,
    "loading": vm.MachineState.STARTING,
    "running": vm.MachineState.RUNNING,
    "stopped": vm.MachineState.STOPPED,
    "frozen": vm.MachineState.STOPPED,
    "exited": vm.MachineState.STOPPED,
}
_PAUSED = ("stopped", "frozen")
_TYPES = {Purchase.ON_DEMAND: "ondemand", Purchase.SPOT: "bid"}
# statuses of a request for an instance: another customer has rented the computer
_GONE = (404, 410)
_NONE_LEFT = "no-such-offer"  # Cavvy's own code: no computer fits the offer at its price any more
_STALE = "invalid_price"  # the price has changed since the search
_TYPE = re.compile(r"(\d+)x_(.+)_\d+GB")  # the form of an instance type
_INSTANCES = "/v1/instances/?limit=25"
# offers are cached, because searches have a daily quota of an undocumented size
_OFFERS_AGE = timedelta(minutes=2)
_MOST_ASKS = 1000  # maximum number of results of one search; the cheapest come first
_NO_TMUX = "touch /root/.no_auto_tmux\n"  # prevents SSH sessions from starting in tmux


class _Ask(Struct, frozen=True):
    """A computer, or a part of a computer, that a host offers. `bid_usd` is None for an on-demand
    offer. `usd` is the total price per hour, including the disk.
    """

    id: int
    region: str
    kind: str
    gpu: KnownAccelerator
    told: Json
    usd: float
    bid_usd: float | None

    @property
    def micros(self) -> int:
        return math.ceil(round(self.usd * 1_000_000, 3))

    @property
    def vcpus(self) -> float:
        return math.floor(float(self.told["cpu_cores_effective"]))

    @property
    def memory_mib(self) -> int:
        """The instance's share of the computer's memory. An instance gets the same fraction of the
        computer's memory as of the computer's GPUs
        (https://docs.vast.ai/guides/instances/docker-environment).
        """
        return int(float(self.told["cpu_ram"]) * float(self.told.get("gpu_frac") or 1))


class VastCloud:
    """Implements `Cloud`. An offer represents all computers in a country with the same number and
    model of GPUs, at the price of the cheapest computer. An instance type consists of the number of
    GPUs, Vast.ai's name for the GPU, and the GPU's memory, such as "2x_RTX_4090_24GB".
    """

    # The limits of the label, of `onstart` and of the rate of requests are those of
    # https://docs.vast.ai/api-reference/instances/create-instance. Instances are not billed while
    # they load (https://docs.vast.ai/guides/instances/manage-instances), apart from their disk.
    traits = vm.CloudTraits(
        name_limit=255,
        launch_every=timedelta(seconds=5),
        user_data_limit=4048 - len(_NO_TMUX),
        bill_starts=vm.BillStart.RUNNING,
        reach=vm.Reach.SSH,
    )

    def __init__(self, settings: Mapping[str, Scalar], now: Callable[[], datetime]) -> None:
        # a separate client for searches, because other calls must work when the searches'
        # own daily
        # quota is used up
        self._market = RestClient(
            str(settings["endpoint"]), lambda: KEYS.read(settings), _read_error
        )
        self.account = RestAccount(settings, now, KEYS, _read_error, others=[self._market])
        self._api = self.account.api
        self._offers: Sequence[Offer] = ()
        self._searched_at: datetime | None = None  # None: the cached offers are out of date

    async def offers(self) -> Sequence[Offer]:
        """Return the offers. The offers are cached for two minutes, but read again after each
        request for an instance.
        """
        now, at = self.account.now(), self._searched_at
        if at is None or not timedelta(0) <= now - at < _OFFERS_AGE:
            self._offers = await self._read_offers()
            self._searched_at = now
        return self._offers

    async def create(self, request: vm.MachineRequest) -> Sequence[str]:
        self._searched_at = None
        ask = await self._choose(request.offer)
        body = {
            "image": self.account.settings["image"],
            "label": request.names[0],
            "disk": self.account.settings["disk_gib"],
            "runtype": "ssh_direct",
            "target_state": "running",
            "cancel_unavail": True,
            "onstart": request.user_data[0] + _NO_TMUX,
        }
        if ask.bid_usd is not None:
            body["price"] = ask.bid_usd
        told = await self._api.send("PUT", f"/v0/asks/{ask.id}/", body)
        return [str(told["new_contract"])]

    async def list(self) -> Sequence[vm.CloudMachine]:
        pages = await self._api.pages(_INSTANCES, _read_next)
        found = [each for page in pages for each in page["instances"]]
        return [_read(each) for each in keep_ours(found, "label")]

    async def get(self, machine: str) -> vm.CloudMachine | None:
        told = (await self._api.get(f"/v0/instances/{machine}/"))["instances"]
        return _read(told) if told else None

    async def delete(self, machine: str) -> None:
        await self._api.send("DELETE", f"/v0/instances/{machine}/")

    def is_full(self, fault: vm.CloudFault) -> bool:
        return fault.status in _GONE or fault.code in (_NONE_LEFT, _STALE)

    async def _read_offers(self) -> Sequence[Offer]:
        found: dict[str, Offer] = {}
        unknown: set[str] = set()
        regions = self.account.names("regions")
        where = {"geolocation": {"in": list(regions)}} if regions else {}
        for purchase in _TYPES:
            for ask in await self._search(purchase, where, unknown):
                offer = self._offer(ask, purchase)
                if offer.key not in found or offer.rate < found[offer.key].rate:
                    found[offer.key] = offer
        self.account.note_unknown(unknown)
        return list(found.values())

    async def _choose(self, offer: Offer) -> _Ask:
        """Return the cheapest computer that fits the offer and costs at most the offer's price."""
        kind = _TYPE.fullmatch(offer.instance_type)
        if kind is None:
            raise vm.CloudFault(400, "unknown instance type", offer.instance_type)
        where = {
            "geolocation": {"in": [offer.region]},
            "gpu_name": {"eq": kind[2].replace("_", " ")},
            "num_gpus": {"eq": int(kind[1])},
        }
        fit = [
            ask
            for ask in await self._search(offer.purchase, where, set())
            if (ask.region, ask.kind) == (offer.region, offer.instance_type)
            and ask.micros <= offer.rate.micros_per_hour
            and ask.vcpus >= offer.vcpus
            and ask.memory_mib >= offer.memory_mib
        ]
        if not fit:
            message = f"no {offer.instance_type} in {offer.region} at this price"
            raise vm.CloudFault(400, _NONE_LEFT, message)
        return min(fit, key=lambda ask: (ask.micros, ask.id))

    async def _search(
        self, purchase: Purchase, where: Mapping[str, object], unknown: set[str]
    ) -> Sequence[_Ask]:
        """Return the available computers that match the settings. The names of GPUs that are not in
        the catalog are added to `unknown`.
        """
        query = self._query(purchase, where)
        text = quote(json.dumps(query, separators=(",", ":")), safe="")
        told = (await self._market.get(f"/v0/bundles/?q={text}"))["offers"]
        asks = []
        for each in told:
            gpu = identify(str(each["gpu_name"]), int(each["gpu_ram"]))
            if gpu is None or not gpu.memory_mib:
                unknown.add(str(each["gpu_name"]))
            elif each["rentable"] and not each.get("rented") and (place := _country(each)):
                asks.append(self._read_ask(each, purchase, gpu, place))
        return [ask for ask in asks if self._is_large(ask)]

    def _query(self, purchase: Purchase, where: Mapping[str, object]) -> Mapping[str, object]:
        """Return the conditions of a search: the conditions from the settings, and the conditions
        in `where`.
        """
        disk = self.account.settings["disk_gib"]
        query = {
            "type": _TYPES[purchase],
            "verified": {"eq": True},
            "rentable": {"eq": True},
            "gpu_arch": {"eq": "nvidia"},
            "direct_port_count": {"gte": 1},
            "disk_space": {"gte": disk},
            "allocated_storage": disk,
            "order": [["dph_total", "asc"]],
            "limit": _MOST_ASKS,
            **where,
        }
        if not self.account.settings["community"]:
            query["datacenter"] = {"eq": True}
        if self.account.settings.get("cuda"):
            query["cuda_max_good"] = {"gte": float(self.account.settings["cuda"])}
        return query

    def _is_large(self, ask: _Ask) -> bool:
        """Return whether the computer has enough vCPUs and memory for each GPU."""
        gpus = int(ask.told["num_gpus"])
        return (
            ask.vcpus >= int(self.account.settings["gpu_vcpus"]) * gpus
            and ask.memory_mib >= int(self.account.settings["gpu_memory_gib"]) * 1000 * gpus
        )

    def _read_ask(self, told: Json, purchase: Purchase, gpu: KnownAccelerator, region: str) -> _Ask:
        bid = None
        if purchase is Purchase.SPOT:
            percent = float(self.account.settings["bid_percent"])
            bid = math.ceil(float(told["min_bid"]) * percent * 100) / 10_000
        compute = float(told["dph_base"]) if bid is None else bid
        name = str(told["gpu_name"]).replace(" ", "_")
        return _Ask(
            id=int(told["id"]),
            region=region,
            kind=f"{told['num_gpus']}x_{name}_{(gpu.memory_mib or 0) // 1024}GB",
            gpu=gpu,
            told=told,
            usd=compute + float(told["storage_total_cost"]),
            bid_usd=bid,
        )

    def _offer(self, ask: _Ask, purchase: Purchase) -> Offer:
        return Offer(
            provider="vast",
            region=ask.region,
            instance_type=ask.kind,
            accelerator=ask.gpu.accelerator.name,
            accelerator_count=int(ask.told["num_gpus"]),
            accelerator_memory_mib=ask.gpu.memory_mib or 0,
            vcpus=ask.vcpus,
            memory_mib=ask.memory_mib,
            disk_gib=int(self.account.settings["disk_gib"]),
            purchase=purchase,
            rate=HourlyRate(ask.micros),
            architecture="arm64" if ask.told.get("cpu_arch") == "arm64" else "x86_64",
            source="Vast.ai API",
            as_of=self.account.now().date(),
        )


def _read_error(told: Json) -> tuple[str, str]:
    return str(told.get("error") or "error"), str(told.get("msg") or told.get("message") or "")


def _country(told: Json) -> str:
    """Return the country in a computer's location, such as "US" for "Texas, US", or "" if the
    country is unknown.
    """
    code = str(told.get("geolocation") or "").rpartition(",")[2].strip()
    return code if re.fullmatch(r"[A-Z]{2}", code) else ""


def _read_next(page: Json) -> str | None:
    token = page.get("next_token")
    return f"{_INSTANCES}&after_token={quote(str(token), safe='')}" if token else None


def _read(told: Json) -> vm.CloudMachine:
    status = told.get("actual_status")
    state = _STATES.get(status, vm.MachineState.RUNNING)  # unknown states may be billed
    ports = (told.get("ports") or {}).get("22/tcp") or []
    target = None
    if told.get("public_ipaddr") and ports:
        address = str(told["public_ipaddr"]).strip()
        target = vm.SshTarget(address=address, port=int(ports[0]["HostPort"]))
    started = told.get("start_date")
    quiet = status in (None, "created", "loading", "running")
    return vm.CloudMachine(
        id=str(told["id"]),
        name=str(told["label"]),
        state=state,
        ssh=target,
        created_at=datetime.fromtimestamp(float(started), UTC) if started else None,
        preempted=bool(told.get("is_bid")) and status in _PAUSED,
        reason="" if quiet else f"Vast.ai reports: {status}",
        waits=_tell_wait(told) if state is vm.MachineState.STARTING else "",
    )


def _tell_wait(told: Json) -> str:
    """Return the status of an instance that starts, with Vast.ai's details, such as the error of an
    image that cannot be pulled.
    """
    status, details = told.get("actual_status") or "provisioning", told.get("status_msg") or ""
    return f"Vast.ai reports: {status} {' '.join(str(details).split())}".rstrip()

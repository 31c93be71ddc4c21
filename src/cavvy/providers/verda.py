"""Verda: each node is one instance that starts the agent on boot.

`VerdaCloud` calls Verda's API, version 1 (https://api.verda.com/v1/docs).

The API stores the user data of a machine as a separate object, a startup script. Cavvy creates the
script before the machine, and deletes it together with the machine.
"""

import os
import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta

from cavvy.catalog.accelerators import identify
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.tasks import Scalar
from cavvy.domain.units import parse_rate
from cavvy.providers.base import Feature, Refused
from cavvy.providers.settings import disk_setting, project_text, regions_setting
from cavvy.providers.vm import cloud as vm
from cavvy.providers.vm.abilities import make_manifest, reach_setting
from cavvy.providers.vm.account import RestAccount, keep_ours
from cavvy.providers.vm.keys import ApiKeySource
from cavvy.providers.vm.leftovers import LeftoverScripts
from cavvy.providers.vm.rest import Json, RestClient

CLIENT_ID = "VERDA_CLIENT_ID"  # an environment variable
KEYS = ApiKeySource(
    provider="verda",
    variables=("VERDA_CLIENT_SECRET",),
    names=("client_secret",),
    made_at="https://console.verda.com (API credentials)",
)
_API = "https://api.verda.com/v1/docs"
_ENDS = "https://docs.verda.com/cpu-and-gpu-instances/shutdown-hibernate-and-delete/"

MANIFEST = make_manifest(
    "verda",
    "Verda",
    cloud="cavvy.providers.verda:VerdaCloud",
    machine="an instance",
    deletion=_ENDS,
    rights="API credentials of the project; their tokens have the scope cloud-api-v1",
    unsupported={
        Feature.CAPACITY: _API,
        Feature.SELF_END: _ENDS,
        Feature.VOLUMES: "https://docs.verda.com/storage/block-volumes/attaching-a-block-volume/",
        Feature.NETWORK: _API,
        Feature.DISK: "all disks have the size of the setting `disk_gib`; a size for one task is "
        f"not supported yet ({_API})",
        Feature.NOTICE: _API,
    },
    settings=(
        project_text(
            "client_id",
            f"The id of the API credentials. The default is `{CLIENT_ID}` in the environment.",
        ).for_setup(),
        KEYS.setting(),
        regions_setting("locations"),
        project_text(
            "ssh_keys",
            "The ids of the project's SSH keys that instances accept, separated by commas. By "
            "default, instances accept no key.",
        ),
        project_text(
            "image",
            "The image of instances. The default is the newest Ubuntu image that Verda lists for "
            "the instance type, with CUDA for GPUs.",
        ),
        disk_setting(
            "The size of the disk of an instance. Verda bills disks separately from instances.",
            100,
            minimum=50,
        ),
        reach_setting(),
    ),
    endpoint="https://api.verda.com/v1",
)


# Verda answers most requests that it cannot serve with `invalid_request`; only the message gives
# the cause.
_FULL = re.compile(r"capacity|available|resources", re.IGNORECASE)
_GONE = re.compile(r"invalid instance id|a discontinued instance", re.IGNORECASE)
_TOO_EARLY = re.compile(r"a provisioning instance", re.IGNORECASE)
_NO_FUNDS = "insufficient_funds"
_SPARE = timedelta(minutes=1)  # a token is replaced this long before it expires
_NEVER = datetime.min.replace(tzinfo=UTC)


class VerdaCloud:
    """Implements `Cloud`."""

    # Verda does not document the maximum length of hostnames; 60 is an assumption.
    traits = vm.CloudTraits(name_limit=60, quota_codes=frozenset({_NO_FUNDS}))

    def __init__(self, settings: Mapping[str, Scalar], now: Callable[[], datetime]) -> None:
        self._token, self._renew_at = "", _NEVER
        self._login = RestClient(str(settings["endpoint"]), lambda: "", _read_error)
        self.account = RestAccount(
            settings, now, KEYS, _read_error, read_key=lambda: self._token, others=[self._login]
        )
        self._api = self.account.api
        self._images: Mapping[str, str] = {}  # instance type -> image
        # machine id -> script, for machines that this process created
        self._scripts: dict[str, str] = {}
        self._leftovers = LeftoverScripts(lambda: self._get("/scripts"), self._drop_scripts, now)
        self._unsure: dict[str, list[str]] = {}  # hostname -> scripts of requests that got no reply

    async def offers(self) -> Sequence[Offer]:
        told = await self._get("/instance-types?currency=usd")
        kinds = {
            str(each["instance_type"]): each
            for each in told
            if each.get("currency", "usd") == "usd"
        }
        models = {_model(each) for each in kinds.values()}
        unknown = self.account.note_unknown(
            each for each in models if each and identify(each) is None
        )
        self._images = {name: _image(each) for name, each in kinds.items()}
        return [
            self._offer(kinds[name], str(place["location_code"]), purchase)
            for purchase in (Purchase.ON_DEMAND, Purchase.SPOT)
            for place in await self._get(f"/instance-availability?isSpot={_flag(purchase)}")
            for name in place["availabilities"]
            if name in kinds and _model(kinds[name]) not in unknown
            if self.account.allows(str(place["location_code"]))
        ]

    async def create(self, request: vm.MachineRequest) -> Sequence[str]:
        name, kind = request.names[0], request.offer.instance_type
        disk: dict[str, object] = {"name": name, "size": int(self.account.settings["disk_gib"])}
        spot = request.offer.purchase is Purchase.SPOT
        if spot:  # by default, Verda keeps the volume of an instance that it takes, and bills it
            disk["on_spot_discontinue"] = "delete_permanently"
        body = {
            "instance_type": kind,
            "image": await self._choose_image(kind),
            "hostname": name,
            "description": name,
            "location_code": request.offer.region,
            "ssh_key_ids": self.account.names("ssh_keys"),
            "os_volume": disk,
            "is_spot": spot,
        }
        script = {"name": name, "script": request.user_data[0]}
        made = await self._send("POST", "/scripts", script)
        try:
            new = await self._send("POST", "/instances", body | {"startup_script_id": made})
        except vm.CloudFault as fault:
            if fault.uncertain:  # the machine may exist and needs its script
                self._unsure.setdefault(name, []).append(made)
            else:
                await self._drop_scripts([*self._unsure.pop(name, ()), made])
            raise
        self._scripts[new] = made
        # the launcher repeats a request only after the list showed no machine of earlier requests
        await self._drop_scripts(self._unsure.pop(name, ()))
        return [new]

    async def list(self) -> Sequence[vm.CloudMachine]:
        found = keep_ours(await self._get("/instances"), "hostname")
        with suppress(vm.CloudFault):  # the next sweep tries again
            await self._leftovers.sweep({str(each["hostname"]) for each in found})
        return [_read(each) for each in found]

    async def get(self, machine: str) -> vm.CloudMachine | None:
        return _read(await self._get(f"/instances/{machine}"))

    async def delete(self, machine: str) -> None:
        told: Json = {}
        try:
            told = await self._get(f"/instances/{machine}")
        except vm.CloudFault as fault:
            if fault.status != 404:  # a new instance may not be listed yet
                raise
        body: dict[str, object] = {"id": [machine], "action": "delete"}
        if volume := told.get("os_volume_id"):  # Verda bills volumes that are kept or in the trash
            body |= {"volume_ids": [volume], "delete_permanently": True}
        await self._send("PUT", "/instances", body)
        mine = self._scripts.pop(machine, "")
        await self._drop_scripts([str(told.get("startup_script_id") or mine)])

    def is_full(self, fault: vm.CloudFault) -> bool:
        return fault.refuses(_FULL)

    async def _get(self, path: str) -> Json:
        return await self._signed_in(lambda: self._api.get(path))

    async def _send(self, method: str, path: str, body: Mapping[str, object] | None = None) -> str:
        told = await self._signed_in(lambda: self._api.send_for_text(method, path, body))
        return str(told)

    async def _signed_in(self, call: Callable[[], Awaitable[Json]]) -> Json:
        """Make a call with a valid access token. After the status 401, repeat the call once with a
        new token, because the old token may have been revoked.
        """
        try:
            await self._log_in()
            try:
                return await call()
            except vm.CloudFault as fault:
                if fault.status != 401:
                    raise
            self._renew_at = _NEVER
            await self._log_in()
            return await call()
        except vm.CloudFault as fault:
            raise _name(fault) from fault

    async def _log_in(self) -> None:
        """Request an access token, unless a valid token exists."""
        if self.account.now() < self._renew_at:
            return
        login = {
            "grant_type": "client_credentials",
            "client_id": self._client_id(),
            "client_secret": KEYS.read(self.account.settings),
        }
        told = await self._login.send("POST", "/oauth2/token", login)
        self._token = str(told["access_token"])
        self._renew_at = self.account.now() + timedelta(seconds=int(told["expires_in"])) - _SPARE

    def _client_id(self) -> str:
        found = str(self.account.settings.get("client_id") or os.environ.get(CLIENT_ID, "")).strip()
        if not found:
            raise Refused(
                "[providers.verda] client_id: no value; set client_id, or the environment "
                f"variable {CLIENT_ID}"
            )
        return found

    async def _choose_image(self, kind: str) -> str:
        if kind not in self._images:
            await self.offers()
        image = str(self.account.settings.get("image") or self._images.get(kind, ""))
        if not image:
            raise Refused(
                f"[providers.verda] image: Verda lists no Ubuntu image for {kind}; name an image "
                "in this setting"
            )
        return image

    async def _drop_scripts(self, scripts: Collection[str]) -> None:
        for script in filter(None, scripts):
            with suppress(vm.CloudFault):
                await self._send("DELETE", f"/scripts/{script}")

    def _offer(self, kind: Json, region: str, purchase: Purchase) -> Offer:
        count = int(kind["gpu"]["number_of_gpus"])
        memory_mib = int(kind["gpu_memory"]["size_in_gigabytes"]) * 1024 // count if count else None
        known = identify(_model(kind), memory_mib) if count else None
        return Offer(
            provider="verda",
            region=region,
            instance_type=str(kind["instance_type"]),
            accelerator=known.accelerator.name if known else None,
            accelerator_count=count,
            accelerator_memory_mib=(known.memory_mib or 0) if known else 0,
            vcpus=int(kind["cpu"]["number_of_cores"]),
            memory_mib=int(kind["memory"]["size_in_gigabytes"]) * 1024,
            disk_gib=int(self.account.settings["disk_gib"]),
            purchase=purchase,
            rate=parse_rate(
                str(kind["spot_price" if purchase is Purchase.SPOT else "price_per_hour"])
            ),
            architecture="arm64" if _model(kind).startswith(("GB", "GH")) else "x86_64",
            source="Verda API",
            as_of=self.account.now().date(),
        )


def _read_error(told: Json) -> tuple[str, str]:
    return told["code"], told["message"]


def _name(fault: vm.CloudFault) -> vm.CloudFault:
    """Return the fault, with the HTTP status that the fault's message implies."""
    if _GONE.search(fault.message):
        return vm.CloudFault(404, fault.code, fault.message)
    if _TOO_EARLY.search(fault.message):  # deleting the instance later will succeed
        return vm.CloudFault(409, fault.code, fault.message)
    return fault


def _flag(purchase: Purchase) -> str:
    return "true" if purchase is Purchase.SPOT else "false"


def _model(kind: Json) -> str:
    """Return the GPU's name in a description, such as "H100 SXM5 80GB" for "8x H100 SXM5 80GB", or
    "" for a type without GPUs.
    """
    if not int(kind["gpu"]["number_of_gpus"]):
        return ""
    return re.sub(r"^\d+x ", "", str(kind["gpu"]["description"]))


def _image(kind: Json) -> str:
    """Return the newest Ubuntu image for an instance type, with CUDA for GPUs, or "" if no image
    fits."""
    names = [str(each) for each in kind["supported_os"] if str(each).startswith("ubuntu-")]
    fit = [each for each in names if ("cuda" in each) == bool(_model(kind))]
    return max(fit, key=lambda name: ([int(n) for n in re.findall(r"\d+", name)], name), default="")


_STATES = vm.StateNames(
    starting="ordered provisioning", stopped="offline error", ended="discontinued deleted"
)


def _read(told: Json) -> vm.CloudMachine:
    status = str(told["status"])
    state = _STATES[status]
    return vm.CloudMachine(
        id=str(told["id"]),
        name=str(told["hostname"]),
        state=state,
        address=told.get("ip") or None,
        ssh=vm.SshTarget(address=str(told["ip"])) if told.get("ip") else None,
        created_at=datetime.fromisoformat(told["created_at"]),
        # an instance that Verda took has the same status as one that its user deleted
        preempted_or_deleted=bool(told.get("is_spot")) and state is vm.MachineState.ENDED,
        reason=""
        if status in ("ordered", "provisioning", "running")
        else f"Verda reports: {status}",
    )

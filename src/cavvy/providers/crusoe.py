"""Crusoe Cloud: each node is one virtual machine that starts the agent on boot.

`CrusoeCloud` calls Crusoe Cloud's API, version v1alpha5 (https://docs.crusoecloud.com/api).
Requests are signed, as https://docs.crusoecloud.com/reference/api describes.

The creation of a machine is an operation: the machine may be missing until the operation ends, and
the operation can fail after the API has accepted the request. The API does not report prices, so
the user enters prices in a setting.
"""

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from urllib.parse import urlsplit

from cavvy.catalog.accelerators import KnownAccelerator, identify
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

_FILE, _MADE_AT = "~/.crusoe/config", "https://console.crusoecloud.com/security/tokens"
KEYS = ApiKeySource(
    provider="crusoe",
    variables=("CRUSOE_SECRET_KEY",),
    files=(_FILE,),
    names=("secret_key",),
    made_at=_MADE_AT,
)
KEY_IDS = ApiKeySource(  # the public part of a key, which is in the same file as the secret part
    provider="crusoe",
    variables=("CRUSOE_ACCESS_KEY_ID",),
    files=(_FILE,),
    names=("access_key_id",),
    made_at=_MADE_AT,
)
_API = "https://docs.crusoecloud.com/api"

MANIFEST = make_manifest(
    "crusoe",
    "Crusoe Cloud",
    cloud="cavvy.providers.crusoe:CrusoeCloud",
    machine="a machine",
    deletion=_API,
    rights="an API key of a user who may list the project's machines, create them and delete them",
    unsupported={
        Feature.SPOT: _API,
        Feature.VOLUMES: _API,
        Feature.NETWORK: "machines get no InfiniBand partition, and their network cannot be "
        f"selected ({_API})",
        Feature.DISK: _API,
        Feature.NOTICE: _API,
    },
    settings=(
        KEYS.setting(),
        project_text(
            "prices",
            "The price of one GPU in USD per hour, by name, such as `H100=3.90 A100=1.95`. "
            "Crusoe's API does not report prices: copy them from your agreement or from "
            "https://www.crusoe.ai/cloud/pricing. Machines with other GPUs are not offered.",
        ),
        project_text(
            "project", "The id of the project. The default is the account's only project."
        ).for_setup(),
        regions_setting("locations"),
        project_text(
            "ssh_key",
            "The public SSH key that machines accept, such as `ssh-ed25519 AAAA...`. Crusoe "
            "requires a key; with `reach_by_ssh`, the default is the server's own key.",
        ),
        project_text(
            "image",
            "The image of machines, as NAME:TAG. The default is Crusoe's newest Ubuntu image with "
            "drivers for the GPU.",
        ),
        reach_setting(),
    ),
    endpoint="https://api.crusoecloud.com/v1alpha5",
)


# The documentation does not list error codes. Users have reported this one.
_OUT_OF_STOCK = "out_of_stock"
# Only the message tells missing capacity from a wrong value.
_FULL = re.compile(r"capacity|out of stock", re.IGNORECASE)
_SHELL, _BASH = "#!/bin/sh\n", "#!/bin/bash\n"
_VERSION = "1.0"


class CrusoeCloud:
    """Implements `Cloud`."""

    # Crusoe documents the maximum length of scripts
    # (https://docs.crusoecloud.com/compute/virtual-machines/managing-lifecycle-scripts), and when
    # bills start and end (the page on states).
    traits = vm.CloudTraits(
        user_data_limit=64_000,
        bill_starts=vm.BillStart.RUNNING,
        bill_ends=vm.BillEnd.SHUTDOWN,
    )

    def __init__(self, settings: Mapping[str, Scalar], now: Callable[[], datetime]) -> None:
        self.account = RestAccount(settings, now, KEYS, _read_error, sign=self._sign)
        self._api = self.account.api
        self._project = str(settings.get("project") or "")
        # operations of creations by this process, by machine
        self._operations: dict[str, tuple[str, str]] = {}

    async def offers(self) -> Sequence[Offer]:
        prices = self._read_prices()
        kinds = (await self._api.get(f"{await self._root()}/compute/vms/types"))["items"]
        known = {str(each["product_name"]): each for each in kinds if int(each["num_gpu"])}
        free = (await self._api.get("/capacities"))["items"]
        self.account.note_unknown(
            str(each["gpu_type"]) for each in known.values() if _identify(each) is None
        )
        return [
            self._offer(known[each["type"]], found, usd, each)
            for each in free
            if each["quantity"] and each["type"] in known
            if self.account.allows(str(each["location"]))
            if (found := _identify(known[each["type"]]))
            if (usd := prices.get(found.accelerator.name)) is not None
        ]

    async def create(self, request: vm.MachineRequest) -> Sequence[str]:
        key = str(self.account.settings.get("ssh_key") or request.public_key)
        if not key:
            raise Refused("[providers.crusoe] ssh_key: not set; Crusoe requires an SSH key")
        body = {
            "name": request.names[0],
            "type": request.offer.instance_type,
            "location": request.offer.region,
            "image": await self._choose_image(request.offer.instance_type),
            "ssh_public_key": key,
            # Crusoe accepts scripts for bash only
            "startup_script": _BASH + request.user_data[0].removeprefix(_SHELL),
        }
        path = f"{await self._root()}/compute/vms/instances"
        made = (await self._api.send("POST", path, body))["operation"]
        machine = str(made["metadata"]["id"])
        self._operations[machine] = str(made["operation_id"]), request.names[0]
        return [machine]

    async def list(self) -> Sequence[vm.CloudMachine]:
        path = f"{await self._root()}/compute/vms/instances?limit=100"

        def read_next(page: Json) -> str | None:
            token = page.get("next_page_token")
            return f"{path}&next_token={token}" if token else None

        pages = await self._api.pages(path, read_next)
        return [_read(each) for page in pages for each in keep_ours(page["items"])]

    async def get(self, machine: str) -> vm.CloudMachine | None:
        root = f"{await self._root()}/compute/vms/instances"
        try:
            return _read(await self._api.get(f"{root}/{machine}"))
        except vm.CloudFault as fault:
            if fault.status != 404:
                raise
        operation, name = self._operations.get(machine, ("", ""))
        if operation:
            told = [await self._api.get(f"{root}/operations/{operation}")]
        else:  # another process made the machine, or an operation began after its creation
            path = f"{root}/operations?resource_id={machine}"
            told = (await self._api.get(path))["items"]
        found = [_read_operation(machine, name, each) for each in told]
        return next(filter(None, found), None)

    async def delete(self, machine: str) -> None:
        await self._api.send("DELETE", f"{await self._root()}/compute/vms/instances/{machine}")
        self._operations.pop(machine, None)

    def is_full(self, fault: vm.CloudFault) -> bool:
        return fault.code == _OUT_OF_STOCK or fault.refuses(_FULL)

    def _sign(self, method: str, url: str, body: bytes | None) -> Mapping[str, str]:
        """Return the headers that sign a request. The signature does not cover the body."""
        settings = self.account.settings
        key_id, secret = KEY_IDS.read(settings), KEYS.read(settings)
        try:
            return sign(key_id, secret, method, url, self.account.now())
        except ValueError as error:
            raise Refused(f"[providers.crusoe]: {error}; check the API key") from error

    def _read_prices(self) -> Mapping[str, Decimal]:
        """Return the prices of one GPU in USD per hour, by accelerator. Raises Refused."""
        words = str(self.account.settings.get("prices") or "").replace(",", " ").split()
        found: dict[str, Decimal] = {}
        for name, _, usd in (word.partition("=") for word in words):
            known = identify(name)
            if known is None or not re.fullmatch(r"\d+(\.\d+)?", usd):
                raise Refused(
                    f"[providers.crusoe] prices: {name}={usd} is not a GPU with its price in USD "
                    "per hour, such as H100=3.90"
                )
            found[known.accelerator.name] = Decimal(usd)
        if not found:
            raise Refused(
                "[providers.crusoe] prices: set the prices of GPUs, such as H100=3.90 A100=1.95, "
                "because Crusoe's API does not report them"
            )
        return found

    async def _root(self) -> str:
        """Return the path of the project. Raises Refused if the project is not known."""
        if not self._project:
            told = (await self._api.get("/organizations/projects"))["items"]
            if len(told) != 1:
                raise Refused(
                    f"[providers.crusoe] project: the account has {len(told)} projects; "
                    "set the id of one"
                )
            self._project = str(told[0]["id"])
        return f"/projects/{self._project}"

    async def _choose_image(self, kind: str) -> str:
        if wanted := str(self.account.settings.get("image") or ""):
            return wanted
        part = "rocm" if kind.startswith("mi") else "sxm" if "-sxm" in kind else "pcie"
        told = (await self._api.get("/compute/images"))["items"]
        names = [str(each["name"]) for each in told]
        fit = [each for each in names if each.startswith("ubuntu") and part in each]
        if not fit:
            raise Refused(
                f"[providers.crusoe] image: Crusoe lists no Ubuntu image for {kind}; name an image"
            )
        newest = max(fit, key=lambda name: ([int(n) for n in re.findall(r"\d+", name)], name))
        return f"{newest}:latest"

    def _offer(self, kind: Json, known: KnownAccelerator, usd: Decimal, place: Json) -> Offer:
        name, count = str(kind["product_name"]), int(kind["num_gpu"])
        return Offer(
            provider="crusoe",
            region=str(place["location"]),
            instance_type=name,
            accelerator=known.accelerator.name,
            accelerator_count=count,
            accelerator_memory_mib=known.memory_mib or 0,
            vcpus=int(kind["cpu_cores"]),
            memory_mib=int(kind["memory_gb"]) * 1024,
            disk_gib=int(kind["disk_gb"]) or None,
            rate=parse_rate(usd * count),
            capacity=int(place["quantity"]),
            pool=name.rpartition(".")[0],  # sizes of one family run on the same hosts
            architecture="x86_64",
            source="Crusoe API, and the setting `prices`",
            as_of=self.account.now().date(),
        )


def _read_error(told: Json) -> tuple[str, str]:
    return told["code"], told["message"]


def _identify(kind: Json) -> KnownAccelerator | None:
    """Return the accelerator in a type such as "a100-80gb-sxm-ib.8x", or None if it is unknown."""
    size = re.search(r"-(\d+)gb", str(kind["product_name"]))
    return identify(str(kind["gpu_type"]), int(size[1]) * 1024 if size else None)


# https://support.crusoecloud.com/hc/en-us/articles/48176498638235
# lists the states. The API writes states with or without the prefix "STATE_".
_STATES = vm.StateNames(
    starting="CREATING INITIALIZING STARTING",
    stopped="STOPPED SHUTOFF CRASHED ERROR",
    ended="DELETING DELETED",
)
_QUIET = ("CREATING", "INITIALIZING", "STARTING", "RUNNING")


def _read(told: Json) -> vm.CloudMachine:
    status = str(told["state"]).removeprefix("STATE_")
    ips = [each for port in told["network_interfaces"] for each in port["ips"]]
    public = [each["public_ipv4"]["address"] for each in ips if each.get("public_ipv4")]
    private = [each["private_ipv4"]["address"] for each in ips if each.get("private_ipv4")]
    return vm.CloudMachine(
        id=str(told["id"]),
        name=str(told["name"]),
        state=_STATES[status],
        address=next(filter(None, [*private, *public]), None),
        ssh=vm.SshTarget(address=str(public[0])) if public and public[0] else None,
        created_at=datetime.fromisoformat(told["created_at"]),
        reason="" if status in _QUIET else f"Crusoe reports: {status}",
    )


def _read_operation(machine: str, name: str, told: Json) -> vm.CloudMachine | None:
    """Return the requested machine while its creation is in progress. If the creation has failed,
    return an ended machine that is not billed. If the creation has succeeded, return None.
    """
    state, result = str(told["state"]), told.get("result") or {}
    if state == "SUCCEEDED":
        return None
    at = datetime.fromisoformat(told["started_at"])
    if state != "FAILED":
        return vm.CloudMachine(
            id=machine, name=name, state=vm.MachineState.REQUESTED, created_at=at
        )
    code = str(result.get("code") or "")
    return vm.CloudMachine(
        id=machine,
        name=name,
        state=vm.MachineState.ENDED,
        created_at=at,
        ended_at=at,
        no_capacity=code == _OUT_OF_STOCK,
        reason=f"Crusoe reports: {code} {result.get('message') or ''}".rstrip(),
    )


def sign(key_id: str, secret: str, method: str, url: str, now: datetime) -> Mapping[str, str]:
    """Return the headers of a request. Raises ValueError if the secret is not in URL-safe base
    64."""
    parts = urlsplit(url)
    path, canonical = parts.path, "&".join(sorted(parts.query.split("&")))
    at = now.astimezone(UTC).isoformat(timespec="seconds")
    payload = f"{path}\n{canonical}\n{method}\n{at}\n".encode()
    digest = hmac.new(_decode(secret), payload, hashlib.sha256).digest()
    signature = base64.urlsafe_b64encode(digest).decode().rstrip("=")
    return {
        "X-Crusoe-Timestamp": at,
        "Authorization": f"Bearer {_VERSION}:{key_id}:{signature}",
    }


def _decode(secret: str) -> bytes:
    padding = "=" * (-len(secret) % 4)
    try:
        return base64.b64decode(secret + padding, altchars=b"-_", validate=True)
    except binascii.Error as error:  # the error's text may contain the secret
        raise ValueError("the secret key is not in URL-safe base 64") from error

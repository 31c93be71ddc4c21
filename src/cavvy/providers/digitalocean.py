"""DigitalOcean: each node is one Droplet that starts the agent on boot.

`DigitalOceanCloud` calls DigitalOcean's API, version 2
(https://docs.digitalocean.com/reference/api).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from math import ceil

from cavvy.catalog.accelerators import KnownAccelerator, Vendor, find_accelerator, identify
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import Scalar
from cavvy.domain.units import HourlyRate, parse_rate
from cavvy.providers.base import Feature
from cavvy.providers.hosts.userdata import MetadataService
from cavvy.providers.settings import project_text, regions_setting
from cavvy.providers.vm import cloud as vm
from cavvy.providers.vm.abilities import make_manifest, reach_setting
from cavvy.providers.vm.account import RestAccount, keep_ours
from cavvy.providers.vm.keys import ApiKeySource
from cavvy.providers.vm.rest import Json

KEYS = ApiKeySource(
    provider="digitalocean",
    variables=("DIGITALOCEAN_ACCESS_TOKEN", "DIGITALOCEAN_TOKEN"),
    files=("~/.config/doctl/config.yaml",),
    names=("access-token",),
    made_at="https://cloud.digitalocean.com/account/api/tokens",
)

# The scopes of the endpoints that the provider calls, and the scopes that these require:
# https://docs.digitalocean.com/reference/api/scopes/droplet/create
SCOPES = (
    "droplet:create",
    "droplet:read",
    "droplet:delete",
    "actions:read",
    "image:read",
    "regions:read",
    "sizes:read",
)

_DOCS = "https://docs.digitalocean.com"
_API = f"{_DOCS}/reference/api"

MANIFEST = make_manifest(
    "digitalocean",
    "DigitalOcean",
    cloud="cavvy.providers.digitalocean:DigitalOceanCloud",
    machine="a Droplet",
    deletion=f"{_DOCS}/products/droplets/how-to/destroy/",
    rights=f"a token with the scopes {', '.join(SCOPES)}, and ssh_key:read if `ssh_keys` is set",
    unsupported={
        Feature.SPOT: _API,
        Feature.CAPACITY: _API,
        Feature.SELF_END: f"{_DOCS}/products/droplets/details/pricing",
        Feature.VOLUMES: f"{_DOCS}/products/volumes/",
        Feature.NETWORK: "Droplets are in the region's default VPC; another VPC cannot be "
        f"selected yet ({_DOCS}/products/networking/vpc/)",
        Feature.DISK: f"{_DOCS}/products/droplets/concepts/choosing-a-plan/",
        Feature.NOTICE: _API,
    },
    settings=(
        KEYS.setting(),
        regions_setting("regions"),
        project_text(
            "ssh_keys",
            "The ids or fingerprints of the account's SSH keys that Droplets accept, separated "
            "by commas. By default, Droplets accept no SSH key.",
        ),
        project_text(
            "image",
            "The image of Droplets, as a slug. The default is DigitalOcean's AI/ML-ready image for "
            "GPUs, and Ubuntu 24.04 for sizes without GPUs.",
        ),
        reach_setting(),
    ),
    endpoint="https://api.digitalocean.com/v2",
)


# DigitalOcean answers every request that it cannot serve with status 422; only the message gives
# the cause.
_FULL = re.compile(
    r"\b(size|region)\b.* (not (currently )?available|unavailable|restricted)|capacity",
    re.IGNORECASE,
)
_OVER_LIMIT = re.compile(r"exceed your .*limit", re.IGNORECASE)
_CENT = 10_000  # one cent in millionths of a dollar
_LIMIT = "droplet-limit"  # Cavvy's code for this fault: the account's limit of Droplets is reached
_METADATA = "http://169.254.169.254/metadata/v1"
_PLAIN_IMAGE, _AMD_IMAGE = "ubuntu-24-04-x64", "gpu-amd-base"
_NVIDIA_IMAGE, _NVIDIA_8_IMAGE = "gpu-h100x1-base", "gpu-h100x8-base"  # with NVIDIA's driver


class DigitalOceanCloud:
    """Implements `Cloud`."""

    # The API documents the limits of names and user data. Droplets get no tags, because tags remain
    # after their Droplets are deleted; the name, which may have 255 characters, contains the same
    # data. The default route uses the public interface, so nodes look up their private address
    # (https://docs.digitalocean.com/reference/api/metadata).
    traits = vm.CloudTraits(
        name_limit=255,
        user_data_limit=65536,
        quota_codes=frozenset({_LIMIT}),
        metadata=MetadataService(rank="", address=f"{_METADATA}/interfaces/private/0/ipv4/address"),
    )

    def __init__(self, settings: Mapping[str, Scalar], now: Callable[[], datetime]) -> None:
        self.account = RestAccount(settings, now, KEYS, lambda told: (told["id"], told["message"]))
        self._api = self.account.api

    async def offers(self) -> Sequence[Offer]:
        sizes = [each for each in await self._all("/sizes", "sizes") if each["available"]]
        unknown = {_model(each) for each in sizes if _model(each) and _identify(each) is None}
        self.account.note_unknown(unknown)
        return [
            self._offer(size, region)
            for size in sizes
            for region in size["regions"]
            if _model(size) not in unknown and self.account.allows(region)
        ]

    async def create(self, request: vm.MachineRequest) -> Sequence[str]:
        body = {
            "name": request.names[0],
            "region": request.offer.region,
            "size": request.offer.instance_type,
            "image": str(self.account.settings.get("image") or _image(request.offer)),
            "ssh_keys": self.account.names("ssh_keys"),
            "user_data": request.user_data[0],
        }
        try:
            told = await self._api.send("POST", "/droplets", body)
        except vm.CloudFault as fault:
            raise self.name_limit(fault) from fault
        return [str(told["droplet"]["id"])]

    async def list(self) -> Sequence[vm.CloudMachine]:
        plain = await self._all("/droplets", "droplets", "type=droplets&")
        # the list without `type` contains no GPU Droplets
        gpus = await self._all("/droplets", "droplets", "type=gpus&")
        ours = keep_ours([*plain, *gpus])
        return list({str(each["id"]): _read(each) for each in ours}.values())

    async def get(self, machine: str) -> vm.CloudMachine | None:
        return _read((await self._api.get(f"/droplets/{machine}"))["droplet"])

    async def delete(self, machine: str) -> None:
        await self._api.send("DELETE", f"/droplets/{machine}")

    def is_full(self, fault: vm.CloudFault) -> bool:
        """Return whether the message says that a size or region is not available. Messages with the
        status 422 that mention no shortage report an invalid value, so a request for a different
        size would also fail.
        """
        return fault.status == 422 and _FULL.search(fault.message) is not None

    def name_limit(self, fault: vm.CloudFault) -> vm.CloudFault:
        """Return the fault, with the code `_LIMIT` if the account's limit of Droplets is
        reached."""
        if fault.status == 422 and _OVER_LIMIT.search(fault.message):
            return vm.CloudFault(fault.status, _LIMIT, fault.message)
        return fault

    async def _all(self, path: str, field: str, query: str = "") -> Sequence[Json]:
        pages = await self._api.pages(
            f"{path}?{query}per_page=200",
            lambda page: ((page.get("links") or {}).get("pages") or {}).get("next"),
        )
        return [each for page in pages for each in page[field]]

    def _offer(self, size: Json, region: str) -> Offer:
        known, rate = _identify(size), parse_rate(str(size["price_hourly"]))
        return Offer(
            provider="digitalocean",
            region=str(region),
            instance_type=str(size["slug"]),
            accelerator=known.accelerator.name if known else None,
            accelerator_count=int(size["gpu_info"]["count"]) if known else 0,
            accelerator_memory_mib=(known.memory_mib or 0) if known else 0,
            vcpus=int(size["vcpus"]),
            memory_mib=int(size["memory"]),
            disk_gib=int(size["disk"]),
            rate=rate,
            minimum_charge=_minimum_charge(rate),
            architecture="x86_64",
            source="DigitalOcean API",
            as_of=self.account.now().date(),
        )


def _model(size: Json) -> str:
    """Return the GPU's name in the API, such as "nvidia_h100", or "" for a size without GPUs."""
    return str((size.get("gpu_info") or {}).get("model") or "")


def _identify(size: Json) -> KnownAccelerator | None:
    if not _model(size):
        return None
    return identify(_model(size), int(size["gpu_info"]["vram"]["amount"]) * 1024)


def _minimum_charge(rate: HourlyRate) -> timedelta:
    """Return the minimum charge of 60 seconds or $0.01, whichever is more. DigitalOcean documents
    this minimum for CPU Droplets (https://docs.digitalocean.com/products/droplets/details/pricing);
    Cavvy assumes the same minimum for GPU Droplets.
    """
    if not rate.micros_per_hour:
        return timedelta(0)
    return timedelta(seconds=max(60, ceil(3600 * _CENT / rate.micros_per_hour)))


def _image(offer: Offer) -> str:
    known = find_accelerator(offer.accelerator or "")
    if known is None:
        return _PLAIN_IMAGE
    if known.accelerator.vendor is Vendor.AMD:
        return _AMD_IMAGE
    return _NVIDIA_8_IMAGE if offer.accelerator_count == 8 else _NVIDIA_IMAGE


_STATES = vm.StateNames(starting="new", stopped="off", ended="archive")


def _read(told: Json) -> vm.CloudMachine:
    addresses = {each["type"]: str(each["ip_address"]) for each in told["networks"]["v4"]}
    status = str(told["status"])
    return vm.CloudMachine(
        id=str(told["id"]),
        name=str(told["name"]),
        state=_STATES[status],
        address=addresses.get("private") or addresses.get("public"),
        ssh=vm.SshTarget(address=addresses["public"]) if "public" in addresses else None,
        created_at=datetime.fromisoformat(told["created_at"]),
        reason="" if status in ("new", "active") else f"DigitalOcean reports: {status}",
    )

"""A strict stand-in for DigitalOcean's API 2 over a cloud in memory: an HTTP server that refuses
requests which the published description (https://docs.digitalocean.com/reference/api) does not
allow, lists GPU Droplets only on request, and returns lists in pages.
"""

import asyncio
import re
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.contract.rest_stand_in import RestStandIn, must_exist
from tests.contract.vm_cloud import MemoryCloud

from cavvy.domain.offers import Offer
from cavvy.domain.units import HourlyRate
from cavvy.providers.vm.cloud import CloudFault, CloudMachine, MachineRequest, MachineState

SIZES = {  # slug: USD an hour, vCPUs, MiB of memory, GiB of disk, GPU, GPUs, GiB of each GPU
    "s-4vcpu-8gb": (0.07143, 4, 8192, 160, None, 0, 0),
    "gpu-h100x1-80gb": (3.39, 20, 245760, 720, "nvidia_h100", 1, 80),
    "gpu-h100x8-640gb": (23.92, 160, 1966080, 2048, "nvidia_h100", 8, 80),
    "gpu-mi300x1-192gb": (1.99, 20, 245760, 720, "amd_mi300x", 1, 192),
    "gpu-next": (9.99, 20, 245760, 720, "nvidia_z9000", 1, 999),
}
REGIONS = ("nyc2", "tor1")
IMAGES = ("ubuntu-24-04-x64", "gpu-h100x1-base", "gpu-h100x8-base", "gpu-amd-base")
_FIELDS = {
    "name", "names", "region", "size", "image", "ssh_keys", "backups", "backup_policy", "ipv6",
    "monitoring", "tags", "user_data", "volumes", "vpc_uuid", "with_droplet_agent",
}  # fmt: skip
_STATES = {
    MachineState.STARTING: "new",
    MachineState.RUNNING: "active",
    MachineState.STOPPED: "off",
    MachineState.ENDED: "archive",
}
_PAGE = 2  # the longest page of this stand-in, so that lists have several
_PLAIN_SIZE = "s-4vcpu-8gb"


class DigitalOceanStandIn(RestStandIn):
    """The API in front of a cloud in memory."""

    key = "dop_v1_test"
    denied = CloudFault(401, "unauthorized", "Unable to authenticate you")

    def __init__(self, cloud: MemoryCloud) -> None:
        super().__init__(cloud, "/v2")
        self.sizes: dict[str, str] = {}  # of Droplets, by id
        self.images: list[str] = []  # that were requested
        self.limit = 1000
        self.others: list[dict[str, Any]] = []  # Droplets that Cavvy did not make

    def describe(self, fault: CloudFault) -> object:
        return {"id": fault.code, "message": fault.message}

    def answer(self, method: str, path: str, body: Any) -> tuple[int, object]:
        parts = urlsplit(path)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        match method, parts.path:
            case "GET", "/sizes":
                return 200, self._page("sizes", [_size(slug) for slug in SIZES], path, query)
            case "GET", "/droplets":
                return 200, self._page("droplets", self._list(query), path, query)
            case "POST", "/droplets":
                return 202, {"droplet": {"id": int(self._create(body))}}
        if method == "DELETE":
            asyncio.run(self.cloud.delete(_id(parts.path)))
            return 204, None
        found = must_exist(asyncio.run(self.cloud.get(_id(parts.path))))
        return 200, {"droplet": self._show(found)}

    def _page(
        self, field: str, items: list[dict[str, Any]], path: str, query: dict[str, str]
    ) -> dict[str, Any]:
        number = int(query.get("page", 1))
        size = min(_PAGE, int(query.get("per_page", 20)))
        links: dict[str, Any] = {}
        if number * size < len(items):
            rest = re.sub(r"[?&]page=\d+", "", path)
            url = f"{self.url}{rest}&page={number + 1}"
            links = {"pages": {"next": url}}
        shown = items[(number - 1) * size : number * size]
        return {field: shown, "links": links, "meta": {"total": len(items)}}

    def _list(self, query: dict[str, str]) -> list[dict[str, Any]]:
        gpus = query.get("type", "droplets") == "gpus"
        found = asyncio.run(self.cloud.list())
        shown = [self._show(each) for each in found if (self._size_of(each) != _PLAIN_SIZE) == gpus]
        return shown if gpus else shown + self.others

    def _size_of(self, machine: CloudMachine) -> str:
        return self.sizes.get(machine.id, _PLAIN_SIZE)

    def _create(self, body: Any) -> str:
        self._check(body)
        if len(self.cloud.billed()) >= self.limit:
            message = "creating this/these droplet(s) will exceed your droplet limit"
            raise CloudFault(422, "unprocessable_entity", message)
        offer = Offer(
            provider="digitalocean", region="here", instance_type="small", rate=HourlyRate(0)
        )
        request = MachineRequest(
            gang=None,  # type: ignore[arg-type]  # the cloud in memory does not read it
            offer=offer,
            names=[body["name"]],
            user_data=[body["user_data"]],
            tags=dict(each.split(":", 1) for each in body.get("tags", ())),
        )
        try:
            (new,) = asyncio.run(self.cloud.create(request))
        except CloudFault as fault:
            if self.cloud.is_full(fault):
                message = "Size is not available in this region."
                raise CloudFault(422, "unprocessable_entity", message) from fault
            raise
        self.sizes[new] = body["size"]
        self.images.append(body["image"])
        return new.removeprefix("vm-")

    def _check(self, body: Any) -> None:
        """Raise the fault of a request that the description does not allow."""
        good = (
            set(body) <= _FIELDS
            and re.fullmatch(r"[a-zA-Z0-9.-]{1,255}", body["name"])
            and body["region"] in REGIONS
            and body["size"] in SIZES
            and body["image"] in IMAGES
            and isinstance(body["ssh_keys"], list)
            and len(body["user_data"].encode()) <= 65536
            and all(re.fullmatch(r"[\w:-]{1,255}", each) for each in body.get("tags", ()))
        )
        if not good:
            raise CloudFault(422, "unprocessable_entity", "a value is not allowed")

    def _show(self, machine: CloudMachine) -> dict[str, Any]:
        assert machine.created_at is not None
        networks = [{"ip_address": "198.51.100.2", "type": "public"}]
        if machine.address:
            networks.append({"ip_address": machine.address, "type": "private"})
        return {
            "id": int(machine.id.removeprefix("vm-")),
            "name": machine.name,
            "status": _STATES[machine.state],
            "created_at": machine.created_at.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "networks": {"v4": networks, "v6": []},
            "size_slug": self._size_of(machine),
            "tags": [f"{key}:{value}" for key, value in machine.tags.items()],
        }


def _size(slug: str) -> dict[str, Any]:
    usd, vcpus, memory, disk, model, count, vram = SIZES[slug]
    told: dict[str, Any] = {
        "slug": slug,
        "memory": memory,
        "vcpus": vcpus,
        "disk": disk,
        "price_hourly": usd,
        "regions": list(REGIONS),
        "available": True,
    }
    if model:
        told["gpu_info"] = {
            "count": count,
            "model": model,
            "vram": {"amount": vram, "unit": "gib"},
        }
    return told


def _id(path: str) -> str:
    found = re.fullmatch(r"/droplets/(\d+)", path)
    if found is None:
        raise CloudFault(404, "not_found", path)
    return f"vm-{int(found[1]):06d}"

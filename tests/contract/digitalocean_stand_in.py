"""A strict stand-in for DigitalOcean's API 2 over a cloud in memory: an HTTP server that refuses
requests which the published description (https://docs.digitalocean.com/reference/api) does not
allow, lists GPU Droplets only on request, and returns lists in pages.
"""

import re
from datetime import timedelta
from types import MappingProxyType
from typing import Any

from cavvy.providers.contract import rest_stand_in as stand_in
from cavvy.providers.vm.cloud import CloudFault, CloudMachine

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
    "name": stand_in.text(255, r"[a-zA-Z0-9.-]+"),
    "region": stand_in.one_of(REGIONS),
    "size": stand_in.one_of(SIZES),
    "image": stand_in.one_of(IMAGES),
    "ssh_keys": stand_in.list_of(lambda key: isinstance(key, str | int)),
    "backups": stand_in.flag,
    "ipv6": stand_in.flag,
    "monitoring": stand_in.flag,
    "tags": stand_in.list_of(stand_in.text(255, r"[\w:-]+")),
    "user_data": stand_in.text(65536),
    "volumes": stand_in.list_of(stand_in.text(64)),
    "vpc_uuid": stand_in.text(36),
    "with_droplet_agent": stand_in.flag,
}
_WRONG = "unprocessable_entity"  # the id of all errors with status 422
_PLAIN_SIZE = "s-4vcpu-8gb"
_FAULTS = {
    "insufficient-capacity": CloudFault(422, _WRONG, "Size is not available in this region."),
    "quota-exceeded": CloudFault(
        422, _WRONG, "creating this/these droplet(s) will exceed your droplet limit"
    ),
}


class DigitalOceanStandIn(stand_in.RestStandIn):
    """The API in front of a cloud in memory."""

    # what the cloud sells, as its prices and types state it
    sells = """
    # type             places     accelerators     CPUs  memory   disk     price    spot
    gpu-h100x1-80gb    nyc2,tor1  1xH100/80GiB     20    240GiB   720GiB   3.39     -
    gpu-h100x8-640gb   nyc2,tor1  8xH100/80GiB     160   1920GiB  2048GiB  23.92    -
    gpu-mi300x1-192gb  nyc2,tor1  1xMI300X/192GiB  20    240GiB   720GiB   1.99     -
    s-4vcpu-8gb        nyc2,tor1  -                4     8GiB     160GiB   0.07143  -
    """
    unknown = "nvidia_z9000"
    minimum_charges = MappingProxyType({"s-": timedelta(seconds=504), "": timedelta(minutes=1)})

    root, key = "/v2", "dop_v1_test"
    key_file = "context: default\naccess-token: {key}\n"
    denied = CloudFault(401, "unauthorized", "Unable to authenticate you")
    faults = _FAULTS
    states = stand_in.name_states(starting="new", running="active", stopped="off", ended="archive")

    def set_up(self) -> None:
        self.sizes: dict[str, str] = {}  # of Droplets, by id
        self.images: list[str] = []  # that were requested

    def describe(self, fault: CloudFault) -> object:
        return {"id": fault.code, "message": fault.message}

    def answer(self, request: stand_in.RestRequest) -> tuple[int, object]:
        match request.method, request.path:
            case "GET", "/sizes":
                return 200, self._page("sizes", [_size(slug) for slug in SIZES], request)
            case "GET", "/droplets":
                return 200, self._page("droplets", self._list(request), request)
            case "POST", "/droplets":
                return 202, {"droplet": {"id": stand_in.number_of(self._create(request.body))}}
        found = re.fullmatch(r"/droplets/(\d+)", request.path)
        if found is None:
            raise CloudFault(404, "not_found", request.path)
        if request.method == "DELETE":
            self.end(stand_in.id_of(found[1]))
            return 204, None
        return 200, {"droplet": self._show(self.machine(stand_in.id_of(found[1])))}

    def _page(
        self, field: str, items: list[dict[str, Any]], request: stand_in.RestRequest
    ) -> dict[str, Any]:
        number, size = int(request.query.get("page", 1)), int(request.query.get("per_page", 20))
        shown, more = self.cut(items, number, size)
        links: dict[str, Any] = {}
        if more:
            rest = re.sub(r"[?&]page=\d+", "", request.target)
            rest = rest.removeprefix(re.match(r"/\d+", rest)[0])  # type: ignore[index]
            links = {"pages": {"next": f"{self.origin}{rest}&page={number + 1}"}}
        return {field: shown, "links": links, "meta": {"total": len(items)}}

    def _list(self, request: stand_in.RestRequest) -> list[dict[str, Any]]:
        gpus = request.query.get("type", "droplets") == "gpus"
        shown = [
            self._show(each)
            for each in self.machines()
            if (self._size_of(each) != _PLAIN_SIZE) == gpus
        ]
        return shown if gpus else shown + self.others

    def _size_of(self, machine: CloudMachine) -> str:
        return self.sizes.get(machine.id, _PLAIN_SIZE)

    def _create(self, body: Any) -> str:
        """Start a Droplet. Raises the fault of a request that the description does not allow."""
        if wrong := stand_in.wrong_field(body, _FIELDS, ("name", "region", "size", "image")):
            raise CloudFault(422, _WRONG, f"{wrong} is not allowed")
        new = self.start(body["name"], body.get("user_data", ""))
        self.sizes[new] = body["size"]
        self.images.append(body["image"])
        return new

    def _show(self, machine: CloudMachine) -> dict[str, Any]:
        assert machine.created_at is not None
        networks = [{"ip_address": "198.51.100.2", "type": "public"}]
        if machine.address:
            networks.append({"ip_address": machine.address, "type": "private"})
        return {
            "id": stand_in.number_of(machine.id),
            "name": machine.name,
            "status": self.states[machine.state],
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

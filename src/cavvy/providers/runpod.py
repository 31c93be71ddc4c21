"""Runpod: each node is one pod, on which the server starts the agent by SSH.

`RunpodCloud` calls Runpod's REST API, version 2 (https://docs.runpod.io/api-reference-v2). Version
1 was to be retired on 15 November 2026 (https://docs.runpod.io/api/errors).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from urllib.parse import quote

from cavvy.catalog.accelerators import identify
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import Scalar
from cavvy.domain.units import HourlyRate
from cavvy.providers.base import Feature
from cavvy.providers.settings import (
    disk_setting,
    host_settings,
    project_flag,
    project_text,
)
from cavvy.providers.vm import cloud as vm
from cavvy.providers.vm.abilities import make_manifest
from cavvy.providers.vm.account import RestAccount, keep_ours
from cavvy.providers.vm.keys import ApiKeySource
from cavvy.providers.vm.rest import Json

KEYS = ApiKeySource(
    provider="runpod",
    variables=("RUNPOD_API_KEY",),
    files=("~/.runpod/config.toml",),
    names=("apikey", "api_key"),
    made_at="https://console.runpod.io/user/settings",
)
_DOCS = "https://docs.runpod.io"
_CREATE = f"{_DOCS}/api-reference-v2/pods/create-a-pod"
_STORAGE = f"{_DOCS}/pods/storage/types"
_CONTAINER = (
    "a pod is a container, and Runpod lets no pod start further containers "
    f"({_DOCS}/references/faq#can-i-run-my-own-docker-daemon-on-runpod)"
)

MANIFEST = make_manifest(
    "runpod",
    "Runpod",
    cloud="cavvy.providers.runpod:RunpodCloud",
    machine="a pod",
    deletion=_STORAGE,
    rights="an API key that may read and write pods",
    unsupported={
        Feature.SPOT: f"version 2 of Runpod's API starts on-demand pods only ({_CREATE})",
        Feature.IMAGE: f"{_CONTAINER}; the setting `image` selects the image of all pods",
        Feature.BUILD: _CONTAINER,
        Feature.LOGIN: f"{_CONTAINER}; the setting `registry` selects the registry "
        "credentials with which Runpod pulls the image of pods",
        Feature.CAPACITY: "Runpod reports whether a data center has a kind of GPU, but not how "
        f"many GPUs are free ({_DOCS}/api-reference-v2/catalog/list-gpu-types)",
        Feature.SELF_END: "Runpod bills a pod until the API terminates the pod "
        f"({_DOCS}/pods/manage-pods), and pods get no API key; the server terminates pods that "
        "have exited",
        Feature.VOLUMES: _STORAGE,
        Feature.MOUNTS: "a pod is a container without access to folders of its host or to NFS "
        f"({_CREATE})",
        Feature.TUNNEL: "a pod is a container without the permission to create "
        f"a WireGuard interface ({_CREATE})",
        Feature.NETWORK: _CREATE,
        Feature.DISK: "the setting `disk_gib` selects the size of the disk for all pods; a size "
        f"for one task is not supported yet ({_CREATE})",
        Feature.NOTICE: "version 2 of Runpod's API creates only on-demand pods, which Runpod does "
        f"not reclaim ({_CREATE})",
    },
    settings=(
        KEYS.setting(),
        project_text(
            "regions",
            "The data centers to use, separated by commas, such as `EU-RO-1, US-KS-2`; "
            "`community` selects the community cloud. The default is all data centers, and "
            "the community cloud only if `community` is set.",
        ).for_setup(),
        project_flag(
            "community",
            "Also use the community cloud: cheaper pods on computers of other people, who can "
            "read the data and programs of pods.",
        ),
        project_text(
            "image",
            "The image of pods. The image must start an SSH server that accepts the key in the "
            "environment variable PUBLIC_KEY, as Runpod's own images do.",
            "runpod/pytorch:1.0.2-cu1281-torch280-ubuntu2404",
        ),
        project_text(
            "cuda",
            'The lowest CUDA version that the host of a pod must support, such as "12.8", the '
            "version that the default `image` needs. If this is empty, pods run on any host.",
            "12.8",
        ),
        project_text(
            "registry", "The id of the account's registry credentials, for a private `image`."
        ),
        disk_setting("The size of a pod's disk.", 50, minimum=1, unit="GB"),
        *host_settings("hosts"),
    ),
    endpoint="https://api.runpod.io/v2",
)


# The API does not describe its error for missing capacity. These words occur in messages that users
# reported, such as https://github.com/runpod/runpod-python/issues/21.
# Only the message tells missing capacity from a wrong value.
_FULL = re.compile(r"no longer any instances|no instances|not enough free|capacity", re.IGNORECASE)
_NO_NETWORK = "no-global-network"  # Cavvy's own code: pods in this region cannot reach each other
_COUNTS = (1, 2, 4, 8)  # numbers of GPUs that a pod can have
_COMMUNITY = "community"  # the region of all pods in the community cloud
_SSH_PORT = "22/tcp"
# The published description of the API mentions no pages. Users have reported the parameters `limit`
# (at most 1000) and `cursor`, and the field `pagination` in replies.
_PODS = "/pods?limit=1000"
_TYPE = re.compile(r"(\d+)x_(.+)")  # the form of an instance type


class RunpodCloud:
    """Implements `Cloud`. An instance type consists of the number of GPUs and
    Runpod's name for the GPU, with "_" for each space, such as "2x_NVIDIA_A40".
    """

    traits = vm.CloudTraits(reach=vm.Reach.SSH)

    def __init__(self, settings: Mapping[str, Scalar], now: Callable[[], datetime]) -> None:
        self.account = RestAccount(
            settings, now, KEYS, lambda told: (told["title"], told["detail"])
        )
        self._api = self.account.api

    async def offers(self) -> Sequence[Offer]:
        clouds = ["secure", *([_COMMUNITY] if self.account.settings["community"] else [])]
        found, unknown = [], set()
        for cloud in clouds:
            for count in _COUNTS:
                for gpu in await self._list_gpus(cloud, count):
                    if _memory_mib(gpu) is None:
                        unknown.add(str(gpu["id"]))
                    elif gpu["availability"] != "NONE" and gpu["maxCount"][cloud] >= count:
                        found += [
                            self._offer(gpu, cloud, count, region)
                            for region in _regions(gpu, cloud)
                            if self.account.allows(str(region))
                        ]
        self.account.note_unknown(unknown)
        return found

    async def create(self, request: vm.MachineRequest) -> Sequence[str]:
        kind = _TYPE.fullmatch(request.offer.instance_type)
        if kind is None:
            raise vm.CloudFault(400, "unknown instance type", request.offer.instance_type)
        region, network = request.offer.region, request.gang.nodes > 1
        if network:
            await self._check_network(region)
        wanted = {
            "id": kind[2].replace("_", " "),
            "count": int(kind[1]),
            "minVcpuCountPerGpu": self.account.settings["gpu_vcpus"],
            "minRamPerGpu": self.account.settings["gpu_memory_gib"],
        }
        if self.account.settings["cuda"]:
            wanted["minCudaVersion"] = str(self.account.settings["cuda"])
        body = {
            "name": request.names[0],
            "image": self.account.settings["image"],
            "cloud": "COMMUNITY" if region == _COMMUNITY else "SECURE",
            "gpu": wanted,
            "disk": self.account.settings["disk_gib"],
            "ports": [_SSH_PORT],
            "env": {"PUBLIC_KEY": request.public_key},
            "startSsh": True,
            "globalNetworking": network,
            "dataCenterIds": [] if region == _COMMUNITY else [region],
        }
        if self.account.settings.get("registry"):
            body["registry"] = self.account.settings["registry"]
        return [str((await self._api.send("POST", "/pods", body))["id"])]

    async def list(self) -> Sequence[vm.CloudMachine]:
        pages = await self._api.pages(_PODS, _read_next)
        found = [each for page in pages for each in page["pods"]]
        return [_read(each) for each in keep_ours(found)]

    async def get(self, machine: str) -> vm.CloudMachine | None:
        return _read(await self._api.get(f"/pods/{machine}"))

    async def delete(self, machine: str) -> None:
        await self._api.send("DELETE", f"/pods/{machine}")

    def is_full(self, fault: vm.CloudFault) -> bool:
        return fault.code == _NO_NETWORK or fault.refuses(_FULL)

    async def _list_gpus(self, cloud: str, count: int) -> Sequence[Json]:
        """Return the GPUs that can be rented. Only NVIDIA's GPUs are returned, because the default
        image needs an NVIDIA GPU.
        """
        query = f"include=AVAILABILITY&product=POD&count={count}&cloud={cloud.upper()}"
        if self.account.settings["cuda"]:
            query += f"&minCudaVersion={self.account.settings['cuda']}"
        told = (await self._api.get(f"/catalog/gpus?{query}"))["gpus"]
        return [each for each in told if each["manufacturer"] == "NVIDIA" and each[cloud]]

    async def _check_network(self, region: str) -> None:
        """Raise CloudFault if pods of the region cannot connect to each other."""
        told = (await self._api.get("/catalog/datacenters"))["dataCenters"]
        if region not in [each["id"] for each in told if each["globalNetwork"]]:
            message = f"pods in {region} cannot connect to each other"
            raise vm.CloudFault(400, _NO_NETWORK, message)

    def _offer(self, gpu: Json, cloud: str, count: int, region: str) -> Offer:
        known = identify(str(gpu["id"]), int(gpu["memory"]) * 1024)
        return Offer(
            provider="runpod",
            region=region,
            instance_type=f"{count}x {gpu['id']}".replace(" ", "_"),
            accelerator=known.accelerator.name if known else None,
            accelerator_count=count,
            accelerator_memory_mib=_memory_mib(gpu) or 0,
            vcpus=int(self.account.settings["gpu_vcpus"]) * count,
            memory_mib=int(self.account.settings["gpu_memory_gib"]) * count * 1024,
            disk_gib=int(self.account.settings["disk_gib"]),
            rate=HourlyRate(round(float(gpu["price"][cloud]) * 1_000_000) * count),
            architecture="x86_64",
            source="Runpod API",
            as_of=self.account.now().date(),
        )


def _memory_mib(gpu: Json) -> int | None:
    """Return the memory of one GPU, or None if the GPU is unknown."""
    known = identify(str(gpu["id"]), int(gpu["memory"]) * 1024)
    return known.memory_mib if known else None


def _regions(gpu: Json, cloud: str) -> Sequence[str]:
    """Return the data centers in which the GPU is available now. For the community cloud, the API
    lists no data centers, so the result is the region `community`.
    """
    if cloud == _COMMUNITY:
        return [_COMMUNITY]
    centers = gpu.get("dataCenters") or ()
    return [str(each["id"]) for each in centers if each["availability"] != "NONE"]


def _read_next(page: Json) -> str | None:
    """Return the path of the next page of pods, or None after the last page."""
    told = page.get("pagination") or {}
    cursor = told.get("nextCursor") if told.get("hasNextPage", True) else None
    return f"{_PODS}&cursor={quote(str(cursor), safe='')}" if cursor else None


# the API's `PodStatus`
_STATES = vm.StateNames(
    starting="PROVISIONING STARTING", stopped="EXITED ERROR", ended="TERMINATED"
)


def _read(told: Json) -> vm.CloudMachine:
    status, direct = str(told["status"]), told["ssh"]["direct"]
    target = direct and vm.SshTarget(
        address=str(direct["host"]), port=int(direct["port"]), user=str(direct["username"])
    )
    quiet = status in ("PROVISIONING", "STARTING", "RUNNING")
    return vm.CloudMachine(
        id=str(told["id"]),
        name=str(told["name"]),
        state=_STATES[status],
        address=told["globalNetworking"].get("ip"),
        ssh=target or None,
        created_at=datetime.fromisoformat(told["createdAt"]),
        reason="" if quiet else f"Runpod reports: {status}",
    )

"""Prime Intellect: each node is one pod, on which the server starts the agent by SSH.

`PrimeIntellectCloud` calls Prime Intellect's API, version 1
(https://docs.primeintellect.ai/api-reference).

Prime Intellect rents machines of many clouds through one account. An instance type consists of the
cloud and the cloud's name for the machine, such as "hyperstack.n3-H100x1". Pods run no script at
boot, so the server reaches them by SSH with a key that the API stores in the account.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from decimal import Decimal

from cavvy.catalog.accelerators import KnownAccelerator, identify
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import Scalar
from cavvy.domain.units import HourlyRate, parse_rate
from cavvy.providers.base import Feature
from cavvy.providers.settings import project_flag, project_text, regions_setting
from cavvy.providers.vm import cloud as vm
from cavvy.providers.vm.abilities import make_manifest
from cavvy.providers.vm.account import RestAccount, keep_ours
from cavvy.providers.vm.keys import ApiKeySource
from cavvy.providers.vm.rest import Json

KEYS = ApiKeySource(
    provider="primeintellect",
    variables=("PRIME_API_KEY",),
    files=("~/.prime/config.json",),
    names=('"api_key"',),
    made_at="https://app.primeintellect.ai/dashboard/tokens",
)
_REFERENCE = "https://docs.primeintellect.ai/api-reference"
_AVAILABILITY = f"{_REFERENCE}/check-gpu-availability"
_CREATE = f"{_REFERENCE}/pods/create-pod"
_CONTAINER = (
    f"the pods of some clouds are containers, which cannot start further containers ({_CREATE})"
)

MANIFEST = make_manifest(
    "primeintellect",
    "Prime Intellect",
    cloud="cavvy.providers.primeintellect:PrimeIntellectCloud",
    machine="a pod",
    deletion=f"{_REFERENCE}/pods/delete-pod",
    rights="an API key with the permissions Availability: read and Instances: read and write; the "
    "key must also be able to read and write SSH keys",
    unsupported={
        Feature.SPOT: "the API does not report whether a spot pod was reclaimed "
        f"({_REFERENCE}/pods/get-pod), so Cavvy starts on-demand pods only",
        Feature.IMAGE: f"{_CONTAINER}; the setting `image` selects the image of all pods",
        Feature.BUILD: _CONTAINER,
        Feature.LOGIN: _CONTAINER,
        Feature.CAPACITY: "Prime Intellect reports whether a configuration is in stock, but not "
        f"how many pods are free ({_AVAILABILITY})",
        Feature.SELF_END: "only the API can terminate a pod "
        f"({_REFERENCE}/managing-pods), and nodes get no API key, because a key may terminate all "
        "pods of the account",
        Feature.VOLUMES: _CREATE,
        Feature.MOUNTS: "the pods of some clouds are containers without access to folders of their "
        f"host or to NFS ({_CREATE})",
        Feature.NETWORK: f"the network of most pods is not reported ({_AVAILABILITY})",
        Feature.DISK: f"pods get the default disk of their configuration ({_AVAILABILITY})",
        Feature.NOTICE: "the API describes no notice before a pod ends "
        f"({_REFERENCE}/pods/get-pod)",
    },
    settings=(
        KEYS.setting(),
        project_text(
            "clouds",
            "The clouds to use, by Prime Intellect's names, separated by commas, such as "
            "`hyperstack, lambdalabs`. The default is all clouds.",
        ),
        regions_setting("data centers"),
        project_flag(
            "community",
            "Also use the community cloud: cheaper pods on computers of other people, who can "
            "read the data and programs of pods.",
        ),
        project_text(
            "image",
            "The image of pods, by Prime Intellect's name. Only configurations that have the "
            "image are offered.",
            "ubuntu_22_cuda_12",
        ),
        project_text(
            "team", "The id of the team that pays for pods. The default is your own wallet."
        ),
    ),
    endpoint="https://api.primeintellect.ai/api/v1",
)


_IN_STOCK = ("Available", "Low", "Medium", "High")
# The documentation does not describe the errors for missing capacity. These words are assumptions.
# Only the message tells missing capacity from a wrong value.
_FULL = re.compile(r"capacity|stock|available|doesn't have", re.IGNORECASE)
_GONE = "not-offered"  # Cavvy's own code: the API no longer offers the machine
_NO_GPU = "CPU_NODE"
_CONNECTION = re.compile(r"([\w.-]+)@(\S+?)(?: -p (\d+))?")


class PrimeIntellectCloud:
    """Implements `Cloud`."""

    traits = vm.CloudTraits(reach=vm.Reach.SSH)

    def __init__(self, settings: Mapping[str, Scalar], now: Callable[[], datetime]) -> None:
        self.account = RestAccount(settings, now, KEYS, _read_error)
        self._api = self.account.api
        # (region, instance type, number of GPUs) -> configuration
        self._found: Mapping[tuple[str, str, int], Json] = {}
        self._keys: dict[str, str] = {}  # public key -> id of the SSH key in the account

    async def offers(self) -> Sequence[Offer]:
        told = [each for each in await self._list_available() if self._is_wanted(each)]
        self.account.note_unknown(str(each["gpuType"]) for each in told if _identify(each) is None)
        # if several configurations have the same name, the cheapest comes last and is kept
        told.sort(key=_rate, reverse=True)
        self._found = {_key(each): each for each in told}
        return [
            self._offer(each, known, *key[:2])
            for key, each in self._found.items()
            if (known := _identify(each)) and self.account.allows(key[0])
        ]

    async def create(self, request: vm.MachineRequest) -> Sequence[str]:
        offer = request.offer
        key = offer.region, offer.instance_type, offer.accelerator_count
        if key not in self._found:
            await self.offers()
        if (told := self._found.get(key)) is None:
            raise vm.CloudFault(400, _GONE, offer.instance_type)
        if (now := _rate(told)) > offer.rate:  # the plan was made with another price
            raise vm.CloudFault(400, _GONE, f"{offer.instance_type} costs ${now.usd:f}/h now")
        pod = self._describe(told) | {
            "name": request.names[0],
            # the price may rise after the last list of offers
            "maxPrice": float(offer.rate.usd),
            "sshKeyId": await self._find_key(request.public_key),
        }
        body: dict[str, Json] = {"pod": pod, "provider": {"type": told["provider"]}}
        if team := self.account.settings.get("team"):
            body["team"] = {"teamId": team}
        try:
            made = await self._api.send("POST", "/pods/", body)
        except vm.CloudFault:
            self._keys.clear()  # look the SSH key up again, because it may have been deleted
            raise
        return [str(made["id"])]

    async def list(self) -> Sequence[vm.CloudMachine]:
        return [_read(each) for each in keep_ours(await self._all("/pods/"))]

    async def get(self, machine: str) -> vm.CloudMachine | None:
        return _read(await self._api.get(f"/pods/{machine}"))

    async def delete(self, machine: str) -> None:
        await self._api.send("DELETE", f"/pods/{machine}")

    def is_full(self, fault: vm.CloudFault) -> bool:
        return fault.code == _GONE or fault.refuses(_FULL)

    async def _all(self, path: str) -> Sequence[Json]:
        def read_next(page: Json) -> str | None:
            shown = int(page["offset"]) + len(page["data"])
            more = page["data"] and shown < int(page["total_count"])
            return f"{path}?offset={shown}&limit=100" if more else None

        pages = await self._api.pages(f"{path}?offset=0&limit=100", read_next)
        return [each for page in pages for each in page["data"]]

    async def _list_available(self) -> Sequence[Json]:
        path, found = "/availability/gpus?page_size=100&page=", []
        for page in range(1, 100):
            told = await self._api.get(f"{path}{page}")
            found += told["items"]
            if not told["items"] or len(found) >= int(told["totalCount"]):
                break
        return found

    def _is_wanted(self, told: Json) -> bool:
        """Return whether the configuration is on-demand, in stock, and allowed by the settings."""
        clouds, image = self.account.names("clouds"), self.account.settings["image"]
        price = told["prices"]
        return (
            told["gpuType"] != _NO_GPU
            and told["stockStatus"] in _IN_STOCK
            and not told.get("isSpot")
            and not told.get("prepaidTime")
            and price["onDemand"] is not None
            and price["currency"] == "USD"
            and image in (told["images"] or ())
            and (told["security"] == "secure_cloud" or bool(self.account.settings["community"]))
            and (not clouds or told["provider"] in clouds)
        )

    def _describe(self, told: Json) -> dict[str, Json]:
        """Return the fields that select the configuration in a request for a pod."""
        resources = {"diskSize": "disk", "vcpus": "vcpu", "memory": "memory"}
        wanted = {
            **{name: told[name] for name in ("cloudId", "gpuType", "socket", "gpuCount")},
            **{name: told[part]["defaultCount"] for name, part in resources.items()},
            "dataCenterId": told["dataCenter"],
            "country": told["country"],
            "security": told["security"],
            "image": self.account.settings["image"],
            "autoRestart": False,
        }
        return {name: value for name, value in wanted.items() if value is not None}

    async def _find_key(self, public_key: str) -> str:
        """Return the id of the SSH key in the account. If the account does not contain the key, the
        key is added.
        """
        if public_key not in self._keys:
            for each in await self._all("/ssh_keys/"):
                self._keys[str(each["publicKey"]).strip()] = str(each["id"])
        if public_key not in self._keys:
            body = {"name": "cavvy", "publicKey": public_key}
            told = await self._api.send("POST", "/ssh_keys/", body)
            self._keys[public_key] = str(told["id"])
        return self._keys[public_key]

    def _offer(self, told: Json, known: KnownAccelerator, region: str, kind: str) -> Offer:
        return Offer(
            provider="primeintellect",
            region=region,
            instance_type=kind,
            accelerator=known.accelerator.name,
            accelerator_count=int(told["gpuCount"]),
            accelerator_memory_mib=known.memory_mib or 0,
            vcpus=int(told["vcpu"]["defaultCount"] or 0),
            memory_mib=int(told["memory"]["defaultCount"] or 0) * 1024,
            disk_gib=int(told["disk"]["defaultCount"] or 0) or None,
            rate=_rate(told),
            architecture="arm64" if told["gpuType"].startswith(("GH", "GB")) else "x86_64",
            source="Prime Intellect API",
            as_of=self.account.now().date(),
        )


def _read_error(told: Json) -> tuple[str, str]:
    return "error", str(told["detail"])


def _key(told: Json) -> tuple[str, str, int]:
    """Return the region, the instance type and the number of GPUs of a configuration."""
    region = str(told["dataCenter"] or told["country"] or "any")
    kind = f"{told['provider']}.{told['cloudId']}"
    return region.replace(" ", "_"), kind.replace(" ", "_"), int(told["gpuCount"])


def _identify(told: Json) -> KnownAccelerator | None:
    return identify(str(told["gpuType"]), int(told["gpuMemory"]) * 1024)


def _rate(told: Json) -> HourlyRate:
    """Return the price of the configuration, including default resources that cost extra."""
    usd = Decimal(str(told["prices"]["onDemand"]))
    for part in (told["disk"], told["vcpu"], told["memory"]):
        if part.get("pricePerUnit") and not part.get("defaultIncludedInPrice"):
            usd += Decimal(str(part["pricePerUnit"])) * int(part["defaultCount"] or 0)
    return parse_rate(usd)


def _first(value: Json) -> str:
    """Return the value, its first item if the value is a list, or "" if the value is empty."""
    found = value[0] if isinstance(value, list) and value else value
    return str(found) if found and not isinstance(found, list) else ""


_STATES = vm.StateNames(
    starting="PROVISIONING PENDING", stopped="STOPPED ERROR", ended="TERMINATED"
)
_QUIET = ("PROVISIONING", "PENDING", "ACTIVE")


def _read(told: Json) -> vm.CloudMachine:
    status = str(told["status"])
    state = _STATES[status]
    way = _CONNECTION.fullmatch(_first(told.get("sshConnection")))
    target = way and vm.SshTarget(user=way[1], address=way[2], port=int(way[3] or 22))
    ended = told.get("terminatedAt") if state is vm.MachineState.ENDED else None
    why = str(told.get("installationFailure") or "")
    return vm.CloudMachine(
        id=str(told["id"]),
        name=str(told["name"]),
        state=state,
        address=_first(told.get("ip")) or None,
        ssh=target or None,
        created_at=datetime.fromisoformat(told["createdAt"]),
        ended_at=datetime.fromisoformat(ended) if ended else None,
        reason="" if status in _QUIET else f"Prime Intellect reports: {status} {why}".rstrip(),
        waits=f"Prime Intellect reports: {status} {why}".rstrip()
        if state is vm.MachineState.STARTING
        else "",
    )

"""The VM sizes that Azure reports (Microsoft.Compute/skus), limited to what the subscription may
still rent: its vCPU quotas less their use
(https://learn.microsoft.com/azure/virtual-machines/quotas).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from fnmatch import fnmatchcase

from cavvy.catalog.accelerators import identify
from cavvy.domain.offers import NEW_LIMIT, NodeHardware, Offer, Purchase, Quota, limit_offer
from cavvy.providers.azure.account import COMPUTE, AzureAccount
from cavvy.providers.base import Refused
from cavvy.providers.vm.cloud import CloudFault
from cavvy.providers.vm.regions import QuotaCache
from cavvy.providers.vm.rest import Json

# sizes that are offered by default, in addition to all sizes with accelerators
GENERAL = (
    "Standard_D[0-9]s_v5",
    "Standard_D[0-9][0-9]s_v5",
    "Standard_E[0-9]s_v5",
    "Standard_E[0-9][0-9]s_v5",
    "Standard_F[0-9]s_v2",
    "Standard_F[0-9][0-9]s_v2",
)
# These sizes have a fraction of a GPU that is not in the catalog, although Azure's list reports a
# whole GPU. https://learn.microsoft.com/azure/virtual-machines/sizes/overview#gpu-accelerated
_UNKNOWN_PARTS = {
    "Standard_NV4as_v4": "1/8 of an MI25",
    "Standard_NV8as_v4": "1/4 of an MI25",
    "Standard_NV16as_v4": "1/2 of an MI25",
    "Standard_NG8ads_V620_v1": "1/4 of a V620",
    "Standard_NG16ads_V620_v1": "1/2 of a V620",
}
_ACCELERATED = "Standard_N"
_ARCHITECTURES = {"x64": "x86_64", "Arm64": "arm64"}

FindInstance = Callable[[str, str], Offer | None]

# the quotas for all families together: of on-demand machines, and of spot machines
_ALL, _SPOT = "cores", "lowPriorityCores"

_Quotas = Mapping[str, Quota]  # Azure's name in lower case, such as "standardncfamily" -> quota


class AzureSize(NodeHardware, frozen=True, kw_only=True):
    """A VM size in one region. `why_not` is the reason why the size is not offered, or "" if it is
    offered.
    """

    name: str
    family: str = ""  # Azure's name of the family, which is also the name of its quota
    spot: bool = False
    why_not: str = ""


def read_sizes(
    told: Sequence[Json], patterns: Sequence[str], find_instance: FindInstance
) -> Sequence[AzureSize]:
    """Return the sizes of a region that the patterns select. Sizes that the subscription is not
    allowed to use are omitted.
    """
    return [
        _read(each, find_instance)
        for each in told
        if each.get("resourceType") == "virtualMachines"
        and _is_selected(str(each["name"]), patterns)
        and not any(limit.get("type") == "Location" for limit in each.get("restrictions") or ())
    ]


def _is_selected(name: str, patterns: Sequence[str]) -> bool:
    if patterns:
        return any(fnmatchcase(name.lower(), pattern.lower()) for pattern in patterns)
    return name.startswith(_ACCELERATED) or any(fnmatchcase(name, each) for each in GENERAL)


def _read(told: Json, find_instance: FindInstance) -> AzureSize:
    name = str(told["name"])
    can = {str(each["name"]): str(each["value"]) for each in told.get("capabilities") or ()}
    known = find_instance("azure", name)
    accelerated = name.startswith(_ACCELERATED) or int(can.get("GPUs", 0)) > 0
    chip, count, memory = _find_chip(name, can, known) if accelerated else (None, 0, 0)
    why_not = ""
    if name in _UNKNOWN_PARTS:
        why_not = f"{name} has {_UNKNOWN_PARTS[name]}"
    elif can.get("ConfidentialComputingType"):
        why_not = f"{name} needs a confidential VM"
    elif accelerated and chip is None:
        why_not = name
    return AzureSize(
        name=name,
        family=str(told.get("family") or ""),
        vcpus=int(can.get("vCPUsAvailable") or can["vCPUs"]),
        memory_mib=round(float(can["MemoryGB"]) * 1024),
        architecture=_ARCHITECTURES.get(can.get("CpuArchitectureType", "x64"), "x86_64"),
        accelerator=chip,
        accelerator_count=count,
        accelerator_memory_mib=memory,
        accelerator_part=known.accelerator_part if known else 1.0,
        network_mbps=known.network_mbps if known else None,
        spot=can.get("LowPriorityCapable") == "True",
        why_not=why_not,
    )


def _find_chip(name: str, can: dict[str, str], known: Offer | None) -> tuple[str | None, int, int]:
    """Return the accelerator, the number of accelerators, and the memory of each in MiB, from the
    catalog or, for sizes that the catalog does not contain, from a name such as
    Standard_NC4as_T4_v3. Azure's API does not report an accelerator's product name.
    """
    if known is not None and known.accelerator:
        return known.accelerator, known.accelerator_count, known.accelerator_memory_mib
    for word in re.split("_", name)[2:]:
        found = identify(word)
        if found is not None and found.memory_mib and int(can.get("GPUs", 0)):
            return found.accelerator.name, int(can["GPUs"]), found.memory_mib
    return None, 0, 0


class AzureQuotas:
    """The quotas of one subscription by region, each at most a minute old."""

    def __init__(self, account: AzureAccount, now: Callable[[], datetime]) -> None:
        self._account = account
        self._cache = QuotaCache(self._ask, now)
        self.forget = self._cache.forget

    @property
    def problem(self) -> str:
        """The reason why some quotas could not be read, or "" if all quotas were read."""
        faults = self._cache.faults
        told = (f"{region}: {faults[region]}" for region in sorted(faults))
        return f"cannot be read: {'; '.join(told)}" if faults else ""

    async def read(self, region: str) -> Sequence[Quota]:
        """Return the quotas of vCPUs of a region, sorted by name. Raises CloudFault or Refused if
        the quotas cannot be read, or if the last attempt failed less than a minute ago.
        """
        known = await self._cache.read(region)
        return [known[name] for name in sorted(known)]

    async def limit(
        self, region: str, offers: Sequence[Offer], families: Mapping[str, str]
    ) -> Sequence[Offer]:
        """Return the offers, with their capacity reduced to the unused quota. `families` maps sizes
        to Azure's names of their families. If the quotas cannot be read, the last known quotas are
        used.
        """
        try:
            known = await self._cache.read(region)
        except (CloudFault, Refused):
            known = self._cache.last(region)
        found = []
        for offer in offers:
            family = families.get(offer.instance_type, "").lower()
            spot = offer.purchase is Purchase.SPOT
            names = [_SPOT.lower()] if spot else [_ALL, family]
            needs = [(known[name], offer.vcpus) for name in names if name in known]
            found.append(limit_offer(offer, needs))
        return found

    async def _ask(self, region: str) -> _Quotas:
        path = f"providers/Microsoft.Compute/locations/{region}/usages"
        told = await self._account.all(path, f"api-version={COMPUTE}")
        scope = f"{await self._account.subscription()}/providers/Microsoft.Compute/locations/"
        read = [_read_use(each, region, scope + region) for each in told]
        return {quota.name.lower(): quota for quota in read if quota is not None}


def _read_use(told: Json, region: str, scope: str) -> Quota | None:
    """Parse an entry of the API's list of limits. Returns None if the limit is not a vCPU quota."""
    name = str(told["name"]["value"])
    if name not in (_ALL, _SPOT) and not name.endswith("Family"):
        return None
    spot = name == _SPOT
    return Quota(
        provider="azure",
        name=name,
        family=str(told["name"].get("localizedValue") or name),
        unit="vCPUs",
        region=region,
        purchase=Purchase.SPOT if spot else Purchase.ON_DEMAND,
        limit=float(told["limit"]),
        used=float(told["currentValue"]),
        request=f"az quota update --resource-name {name} --scope {scope} --resource-type "
        f"{'lowPriority' if spot else 'dedicated'} --limit-object value={NEW_LIMIT} "
        "limit-object-type=LimitValue",
    )

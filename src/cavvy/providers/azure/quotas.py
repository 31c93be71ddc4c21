"""Reads the subscription's vCPU quotas and their use, and limits offers to the unused quota.

https://learn.microsoft.com/azure/virtual-machines/quotas
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.quotas import NEW_LIMIT, Quota, limit_offer
from cavvy.providers.azure.account import COMPUTE, AzureAccount
from cavvy.providers.base import Refused
from cavvy.providers.vm.cloud import CloudFault
from cavvy.providers.vm.quotas import QuotaCache
from cavvy.providers.vm.rest import Json

# the quotas for all families together: of on-demand machines, and of spot machines
_ALL, _SPOT = "cores", "lowPriorityCores"

_Quotas = Mapping[str, Quota]  # Azure's name in lower case, such as "standardncfamily" -> quota


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
        read = [_read(each, region, scope + region) for each in told]
        return {quota.name.lower(): quota for quota in read if quota is not None}


def _read(told: Json, region: str, scope: str) -> Quota | None:
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

"""Combines the shapes that OCI lists for each availability domain with the catalog's prices.

OCI charges the same prices in all of OCI's commercial regions
(https://www.oracle.com/cloud/price-list/).
"""

import asyncio
from collections.abc import Mapping, Sequence
from datetime import timedelta

from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.values import replace
from cavvy.providers.base import ProviderContext
from cavvy.providers.oci.api import IDENTITY, OciApi
from cavvy.providers.oci.credentials import OciCredentials
from cavvy.providers.vm.keys import list_setting
from cavvy.providers.vm.regions import RegionalMarket, ask_regions
from cavvy.providers.vm.rest import Json

# "Announcing per-second billing for Compute and Autonomous Database", Oracle's blog
_MINIMUM = timedelta(minutes=1)
_MINIMUM_BARE_METAL = timedelta(hours=1)
_SOLD = (Purchase.ON_DEMAND, Purchase.SPOT)


class OciMarket(RegionalMarket):
    """Reads and caches offers."""

    def __init__(self, api: OciApi, credentials: OciCredentials, context: ProviderContext) -> None:
        super().__init__(context)
        self._api = api
        self._credentials = credentials
        # the offered shapes as OCI describes them, by region, availability domain and name
        self.shapes: Mapping[tuple[str, str, str], Json] = {}
        # GPU shapes without a price in the catalog, or with another number of GPUs there
        self.unpriced: Sequence[str] = ()

    async def regions(self) -> Sequence[str]:
        """Return the regions in the settings, or the region of OCI's profile. Raises Refused."""
        named = list_setting(self._settings, "regions")
        return named or [(await asyncio.to_thread(self._credentials.profile)).region]

    async def compartment(self) -> str:
        """Return the compartment in which instances are created. Raises Refused."""
        named = str(self._settings.get("compartment") or "")
        return named or (await asyncio.to_thread(self._credentials.profile)).tenancy

    async def _join(self) -> Sequence[Offer]:
        prices: dict[str, dict[tuple[str, Purchase], Offer]] = {}
        for each in await asyncio.to_thread(self._list_prices, "oci"):
            if each.purchase in _SOLD:
                # a flexible shape has several sizes, such as VM.Standard.E5.Flex$_8_32
                shape = each.instance_type.partition("$")[0]
                prices.setdefault(shape, {})[each.instance_type, each.purchase] = each
        found, unpriced, known = [], set(), {}
        for region, domain, shape in await self._shapes():
            name, gpus = str(shape["shape"]), int(shape.get("gpus") or 0)
            rows = [row for row in prices.get(name, {}).values() if row.accelerator_count == gpus]
            found += [_make_offer(region, domain, row) for row in rows]
            if rows:
                known[region, domain, name] = shape
            if gpus and not rows:
                unpriced.add(name)
        self.unpriced, self.shapes = sorted(unpriced), known
        return found

    async def _shapes(self) -> Sequence[tuple[str, str, Json]]:
        """Return the shapes of all regions that answer, each with its region and availability
        domain."""
        compartment = await self.compartment()

        async def read(region: str) -> Sequence[tuple[str, str, Json]]:
            told = await self._api.list(
                region, "/availabilityDomains", IDENTITY, compartmentId=compartment
            )
            found = []
            for domain in (str(each["name"]) for each in told):
                query = {"compartmentId": compartment, "availabilityDomain": domain}
                shapes = await self._api.list(region, "/shapes", limit="500", **query)
                names = {str(each["shape"]): each for each in shapes}  # lists may repeat a shape
                found += [(region, domain, each) for each in names.values()]
            return found

        found, self.silent = await ask_regions(await self.regions(), read)
        return found


def _make_offer(region: str, domain: str, price: Offer) -> Offer:
    bare = price.instance_type.startswith("BM.")
    return replace(
        price,
        region=region,
        zone=domain,
        minimum_charge=_MINIMUM_BARE_METAL if bare else _MINIMUM,
    )

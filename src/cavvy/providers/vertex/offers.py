"""The offers of Vertex AI: Compute Engine's machines in the regions and at the prices of Vertex
AI.
"""

import asyncio
import re
from collections.abc import Sequence
from datetime import datetime, timedelta
from fnmatch import fnmatchcase

from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.values import replace
from cavvy.providers.base import ProviderContext, Refused
from cavvy.providers.formats.services.vertex import find_accelerator, is_custom_job_type
from cavvy.providers.vertex.api import VertexApi
from cavvy.providers.vertex.prices import add_fee
from cavvy.providers.vm.keys import list_setting

_AGE = timedelta(minutes=10)
# Machines that Vertex AI starts as spot machines only:
# https://cloud.google.com/vertex-ai/docs/training/configure-compute
_SPOT_ONLY = re.compile(r"a3-highgpu-[124]g")


class VertexOffers:
    """The offers in the regions and for the machine types that the settings of `provider` name."""

    def __init__(self, context: ProviderContext, provider: str, api: VertexApi) -> None:
        self._settings, self._now = context.settings, context.now
        self._list_prices, self._provider, self._api = context.list_prices, provider, api
        self._read: tuple[datetime, Sequence[Offer]] | None = None

    def regions(self) -> Sequence[str]:
        """Return the regions that the settings name. Raises Refused."""
        found = list_setting(self._settings, "regions")
        if not found:
            reason = "not set; name at least one region"
            raise Refused(f"[providers.{self._provider}] regions: {reason}")
        return found

    def check_region(self, region: str) -> None:
        """Raise Refused if the region is not one of `regions`, because Cavvy would never list
        objects that it creates in such a region.
        """
        if region not in self.regions():
            raise Refused(f"the region {region} is not among the `regions` of the settings")

    async def list(self) -> Sequence[Offer]:
        """Return the offers. Offers older than ten minutes are computed again, because the catalog
        may have been refreshed.
        """
        now = self._now()
        if self._read is None or now - self._read[0] >= _AGE:
            # a missing right is reported before a plan relies on it
            await asyncio.gather(*(self._api.check(each) for each in self.regions()))
            self._read = now, self._price(await asyncio.to_thread(self._list_prices, "gcp"))
        return self._read[1]

    def _price(self, known: Sequence[Offer]) -> Sequence[Offer]:
        """Return the offers of Vertex AI, computed from the offers of Compute Engine."""
        regions, patterns = self.regions(), list_setting(self._settings, "machines")
        priced = add_fee([each for each in known if each.region in regions and _is_sold(each)])
        return [
            replace(each, provider=self._provider, zone=None, capacity=None)
            for each in priced
            if any(fnmatchcase(each.instance_type, pattern) for pattern in patterns)
            and not (
                each.purchase is Purchase.ON_DEMAND and _SPOT_ONLY.fullmatch(each.instance_type)
            )
        ]


def name_accelerator(offer: Offer) -> str | None:
    """Return Vertex AI's name for an offer's accelerator. Returns None if the offer has no
    accelerator, or Vertex AI has no name for the accelerator.
    """
    if offer.accelerator is None:
        return None
    return find_accelerator(offer.instance_type, offer.accelerator, offer.accelerator_memory_mib)


def _is_sold(offer: Offer) -> bool:
    """Return whether a custom job can use the machine of this Compute Engine offer."""
    sold = offer.purchase in (Purchase.ON_DEMAND, Purchase.SPOT) and offer.accelerator_part == 1
    if not sold or not is_custom_job_type(offer.instance_type):
        return False
    return offer.accelerator is None or name_accelerator(offer) is not None

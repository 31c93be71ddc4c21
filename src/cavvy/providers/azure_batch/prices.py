"""Reads the prices of spot machines in one region from Azure's public list.

In accounts with the allocation mode "user subscription", pools use Azure's spot virtual machines:
https://learn.microsoft.com/azure/batch/batch-spot-vms
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta

from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.tasks import Scalar
from cavvy.providers.azure.price_list import AzurePrices
from cavvy.providers.prices import PriceError, PriceQuery

_AGE = timedelta(hours=1)


class SpotPrices:
    """Reads and caches the spot offers of a region. If the list cannot be read, the prices from the
    last successful read are still used, and `fault` contains the reason.
    """

    def __init__(self, settings: Mapping[str, Scalar], now: Callable[[], datetime]) -> None:
        self._base, self._now = str(settings.get("prices_endpoint") or "").rstrip("/"), now
        self._read_at: datetime | None = None
        self._offers: Sequence[Offer] = ()
        self.fault = ""

    async def offers(self, region: str, usual: Sequence[Offer]) -> Sequence[Offer]:
        """Return spot offers for the VM sizes of the on-demand offers in `usual`."""
        if self._read_at is None or self._now() - self._read_at >= _AGE:
            try:
                self._offers = await asyncio.to_thread(self._fetch, region, usual)
                self._read_at, self.fault = self._now(), ""
            except PriceError as error:
                self.fault = str(error)
        return self._offers

    def _fetch(self, region: str, usual: Sequence[Offer]) -> Sequence[Offer]:
        """Read the list; blocks. Raises PriceError."""
        machines = {each.instance_type: each for each in usual}
        only = (
            f"armRegionName eq '{region}' and priceType eq 'Consumption' and "
            "contains(meterName, 'Spot')"
        )
        query = PriceQuery(
            machines=machines,
            today=self._now().date(),
            progress=lambda _: None,
            pause=lambda _: None,  # not called, because only one attempt is made
        )
        found = AzurePrices(base=self._base, tries=1, timeout_s=10, only=only).find(query)
        return [
            each
            for each in found
            # a spot price at or above the usual price means that no spot capacity exists
            if each.purchase is Purchase.SPOT and each.rate < machines[each.instance_type].rate
        ]

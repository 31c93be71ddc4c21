"""Looks up the catalog's prices of EC2 for services that run containers on EC2 instances."""

import asyncio
from collections.abc import Sequence
from datetime import datetime, timedelta

from cavvy.domain.offers import Offer, Purchase
from cavvy.providers.base import ProviderContext

# time after which the prices are read again, since the catalog may be newer
_AGE = timedelta(minutes=10)


class Ec2Prices:
    """The catalog's offers of EC2. The caller must call `refresh` before it calls `find`."""

    def __init__(self, context: ProviderContext) -> None:
        self._list_prices, self._now = context.list_prices, context.now
        self._prices: Sequence[Offer] = ()
        self._read_at: datetime | None = None

    async def refresh(self) -> None:
        """Read the catalog's prices, unless the prices read last are newer than `_AGE`."""
        now = self._now()
        if self._read_at is None or now - self._read_at >= _AGE or not self._prices:
            self._prices = await asyncio.to_thread(self._list_prices, "aws")
            self._read_at = now

    def find(self, region: str, name: str, purchase: Purchase) -> Offer | str:
        """Return the offer of an instance type, or the reason why no offer exists. If prices differ
        between zones, the highest price is used.
        """
        known = [
            each
            for each in self._prices
            if (each.region, each.instance_type, each.purchase) == (region, name, purchase)
        ]
        if not known:
            return f"the catalog has no {purchase} price of {name} in {region}"
        return max(known, key=lambda each: each.rate)

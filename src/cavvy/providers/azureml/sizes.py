"""The sizes of machines that Azure Machine Learning sells in a workspace's region, at the prices of
Azure's virtual machines: https://azure.microsoft.com/pricing/details/machine-learning
"""

import asyncio
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from fnmatch import fnmatchcase

from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.values import replace
from cavvy.providers.azureml.api import WorkspaceApi
from cavvy.providers.base import ProviderContext
from cavvy.providers.vm.keys import list_setting

# maximum age of cached offers, because the catalog may have been refreshed
_AGE = timedelta(minutes=10)


class WorkspaceSizes:
    """Lists the VM sizes that `provider` offers in its workspace. A size is offered if the setting
    `sizes` selects it, compute targets of the type `kind` support it, and `is_sold` accepts its
    name in lower case.
    """

    def __init__(
        self,
        api: WorkspaceApi,
        context: ProviderContext,
        provider: str,
        kind: str,
        is_sold: Callable[[str], bool] = lambda size: True,
    ) -> None:
        self._api, self._provider, self._kind, self._is_sold = api, provider, kind, is_sold
        self._settings, self._now = context.settings, context.now
        self._list_prices = context.list_prices
        self._read: tuple[datetime, Sequence[Offer]] | None = None
        self._unpriced: Sequence[str] = ()

    def facts(self) -> Sequence[tuple[str, str]]:
        """Return facts for `cavvy check`, which calls `list` first."""
        names = ", ".join(self._unpriced)
        return [("sizes without a known price", names)] if names else []

    async def list(self) -> Sequence[Offer]:
        """Return the offers of the workspace's region. Raises CloudFault, Refused."""
        now = self._now()
        if self._read is None or now - self._read[0] >= _AGE:
            sizes = {
                name
                for each in await self._api.sizes()
                if self._kind in (each.get("supportedComputeTypes") or ())
                and self._is_sold(name := str(each["name"]).lower())
            }
            await self._api.clusters()  # a missing right is reported before a plan relies on it
            self._read = now, await self._price(sizes)
        return self._read[1]

    async def _price(self, sizes: set[str]) -> Sequence[Offer]:
        region, patterns = await self._api.region(), list_setting(self._settings, "sizes")
        known = {
            each.instance_type.lower(): each
            for each in await asyncio.to_thread(self._list_prices, "azure")
            if (each.region, each.purchase) == (region, Purchase.ON_DEMAND)
        }
        self._unpriced = sorted(sizes - known.keys())
        return [
            replace(known[size], provider=self._provider, zone=None, capacity=None)
            for size in sorted(sizes & known.keys())
            if any(fnmatchcase(size, pattern.lower()) for pattern in patterns)
        ]

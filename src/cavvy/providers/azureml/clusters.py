"""Reads the compute clusters of a workspace, and looks up the prices of their machines.

Azure bills the machines of a cluster at the prices of Azure's virtual machines, without a fee:
https://azure.microsoft.com/pricing/details/machine-learning. Machines with low priority have
separate prices in Azure's public list.
"""

import asyncio
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from fnmatch import fnmatchcase
from typing import Any

from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.units import HourlyRate, parse_rate
from cavvy.domain.values import Struct, replace
from cavvy.providers.azure.price_list import AzurePrices
from cavvy.providers.azureml.api import WorkspaceApi
from cavvy.providers.base import ProviderContext
from cavvy.providers.prices import PriceError, PriceQuery
from cavvy.providers.vm.keys import list_setting
from cavvy.providers.vm.rest import Json

# seconds after which the catalog is read again, since it may have been refreshed
_AGE = timedelta(minutes=10)
_LOW_AGE = timedelta(hours=1)  # seconds for which a price of machines with low priority is cached
# seconds after which a list of prices that could not be read is read again
_FAILED_AGE = timedelta(minutes=5)
_LOW = "LowPriority"


class Cluster(Struct, frozen=True, kw_only=True):
    """A compute cluster. `why_not` is the reason why no job can use the cluster now, or "" if jobs
    can use it."""

    name: str
    id: str = ""
    region: str = ""
    size: str = ""
    low_priority: bool = False
    most_nodes: int = 0
    idle: str = ""  # how long a node stays without a job, such as PT20M
    quota: str = ""  # the cluster's error about a quota
    why_not: str = ""


class Clusters:
    """Lists the compute clusters that the settings select, and their offers. An offer's zone is the
    name of its cluster.
    """

    def __init__(self, api: WorkspaceApi, context: ProviderContext) -> None:
        self._api, self._settings, self._now = api, context.settings, context.now
        self._list_prices = context.list_prices
        prices = str(context.settings.get("prices_endpoint") or "").rstrip("/")
        self._price_list = AzurePrices(base=prices, tries=1, timeout_s=10)
        self._catalog: tuple[datetime, Mapping[tuple[str, str], Offer]] | None = None
        # (region, size) -> when the price was read, and the price; None if the list has none
        self._low: dict[tuple[str, str], tuple[datetime, HourlyRate | None]] = {}
        self._failed: tuple[datetime, PriceError] | None = None  # the last failed read
        self.known: Sequence[Cluster] = ()
        self.left_out: Mapping[str, str] = {}  # the reason by cluster

    async def offers(self) -> Sequence[Offer]:
        """Return one offer for each cluster whose machine type and price are known. Raises
        CloudFault, Refused.
        """
        patterns = list_setting(self._settings, "clusters")
        told = [
            read_cluster(each)
            for each in await self._api.clusters()
            if (each.get("properties") or {}).get("computeType") == "AmlCompute"
            and any(fnmatchcase(str(each["name"]), pattern) for pattern in patterns)
        ]
        found, left_out = [], {}
        for cluster in told:
            offer = cluster.why_not or await self._price(cluster)
            if isinstance(offer, str):
                left_out[cluster.name] = offer
            else:
                found.append(offer)
        self.known, self.left_out = told, left_out
        return found

    async def find(self, name: str) -> Cluster:
        """Return the current state of one cluster."""
        told = await self._api.cluster(name)
        if told is None:
            return Cluster(name=name, why_not="the cluster does not exist")
        return read_cluster(told)

    async def _price(self, cluster: Cluster) -> Offer | str:
        """Return the offer of a cluster, or the reason why the cluster has no offer."""
        machine = (await self._read_catalog()).get((cluster.region, cluster.size.lower()))
        if machine is None:
            return f"the catalog has no price of {cluster.size} in {cluster.region}"
        offer = replace(machine, provider="azureml", zone=cluster.name, capacity=None)
        if not cluster.low_priority:
            return offer
        try:
            rate = await self._read_low(cluster.region, machine.instance_type)
        except PriceError as error:
            return f"the low-priority price is unknown: {error}"
        if rate is None:
            return f"Azure's price list has no low-priority price for {cluster.size}"
        today = self._now().date()
        source = f"{self._price_list.title}, low priority"
        return replace(offer, purchase=Purchase.SPOT, rate=rate, source=source, as_of=today)

    async def _read_catalog(self) -> Mapping[tuple[str, str], Offer]:
        """Return the catalog's on-demand offers by region and VM size. The keys contain VM sizes in
        lower case, because clusters and the catalog use different letter cases.
        """
        now = self._now()
        if self._catalog is None or now - self._catalog[0] >= _AGE:
            told = await asyncio.to_thread(self._list_prices, "azure")
            found = {
                (each.region, each.instance_type.lower()): each
                for each in told
                if each.purchase is Purchase.ON_DEMAND
            }
            self._catalog = now, found
        return self._catalog[1]

    async def _read_low(self, region: str, size: str) -> HourlyRate | None:
        """Return the price of a low-priority machine, or None if the list contains no such price.
        After an error, do not read Azure's price list for some minutes, because each read may take
        seconds. Raises PriceError.
        """
        now, key = self._now(), (region, size)
        if key not in self._low or now - self._low[key][0] >= _LOW_AGE:
            if self._failed is not None and now - self._failed[0] < _FAILED_AGE:
                raise self._failed[1]
            try:
                self._low[key] = now, await asyncio.to_thread(self._fetch_low, region, size)
            except PriceError as error:
                self._failed = now, error
                raise
        return self._low[key][1]

    def _fetch_low(self, region: str, size: str) -> HourlyRate | None:
        condition = (
            f"serviceName eq 'Virtual Machines' and armRegionName eq '{region}' and "
            f"armSkuName eq '{size}' and priceType eq 'Consumption'"
        )
        query = PriceQuery(
            machines={},
            today=self._now().date(),
            progress=lambda _: None,
            pause=lambda _: None,  # not called, because only one attempt is made
        )
        rates = [
            parse_rate(Decimal(str(each["retailPrice"])))
            for each in self._price_list.list_items(condition, query)
            if "Low Priority" in str(each.get("skuName"))
            and "Windows" not in str(each.get("productName"))
            and (each.get("currencyCode"), each.get("unitOfMeasure")) == ("USD", "1 Hour")
            and isinstance(each.get("retailPrice"), int | float)
        ]
        # if one meter replaces another, the dearest counts, so that plans do not understate costs
        return max(rates, default=None)


def read_cluster(told: Json) -> Cluster:
    """Parse a compute target of the type AmlCompute."""
    outer: Mapping[str, Any] = told["properties"]
    inner: Mapping[str, Any] = outer.get("properties") or {}
    scale: Mapping[str, Any] = inner.get("scaleSettings") or {}
    errors = [each.get("error") or each for each in inner.get("errors") or ()]
    quota = next((each for each in errors if "quota" in str(each.get("code")).lower()), None)
    state = str(outer.get("provisioningState"))
    why_not = ""
    if state != "Succeeded":
        why_not = f"the provisioning state is {state}"
    elif str(inner.get("osType") or "Linux") != "Linux":
        why_not = f"the machines run {inner['osType']}; Linux is needed"
    return Cluster(
        name=str(told["name"]),
        id=str(told["id"]),
        region=str(outer.get("computeLocation") or told.get("location")).lower().replace(" ", ""),
        size=str(inner.get("vmSize") or ""),
        low_priority=inner.get("vmPriority") == _LOW,
        most_nodes=int(scale.get("maxNodeCount") or 0),
        idle=str(scale.get("nodeIdleTimeBeforeScaleDown") or ""),
        quota=f"{quota.get('code')}: {quota.get('message')}" if quota else "",
        why_not=why_not,
    )

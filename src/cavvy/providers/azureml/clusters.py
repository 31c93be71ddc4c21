"""Reads the compute clusters of a workspace, looks up the prices of their machines, and creates and
removes clusters for the sizes in the setting `sizes`.

Cavvy's own clusters belong to an installation, whose mark is in their tags. Each has one size, and
no nodes without jobs, so Azure ends the bill even if the server is lost.

Azure bills the machines of a cluster at the prices of Azure's virtual machines, without a fee:
https://azure.microsoft.com/pricing/details/machine-learning. Machines with low priority have
separate prices in Azure's public list.

The sizes of machines that Azure Machine Learning sells in a workspace's region, at the prices of
Azure's virtual machines: https://azure.microsoft.com/pricing/details/machine-learning
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from decimal import Decimal
from fnmatch import fnmatchcase
from typing import Any

from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.units import HourlyRate, parse_rate
from cavvy.domain.values import Struct, replace
from cavvy.providers.azure.price_list import AzurePrices
from cavvy.providers.azureml.api import WorkspaceApi, make_short_name, read_time
from cavvy.providers.base import ProviderContext
from cavvy.providers.prices import PriceError, PriceQuery
from cavvy.providers.vm.cloud import CloudFault
from cavvy.providers.vm.keys import list_setting
from cavvy.providers.vm.leftovers import MOST_DELETED, UNUSED, LeftoverSearch
from cavvy.providers.vm.records import INSTALLATION, make_mark
from cavvy.providers.vm.rest import Json

# seconds after which the catalog is read again, since it may have been refreshed
_AGE = timedelta(minutes=10)
_LOW_AGE = timedelta(hours=1)  # seconds for which a price of machines with low priority is cached
# seconds after which a list of prices that could not be read is read again
_FAILED_AGE = timedelta(minutes=5)
_LOW, _KIND = "LowPriority", "AmlCompute"
FULL = "offer unavailable"  # Cavvy's own code
# The nodes of Cavvy's own clusters. More need a change of the cluster by Azure's support:
# https://learn.microsoft.com/azure/machine-learning/how-to-manage-quotas
_MOST_NODES = 100
_IDLE = "PT2M"  # how long they stay without a job; Azure's own default
# https://learn.microsoft.com/rest/api/azureml/compute/get#provisioningstate
_BUSY = frozenset({"Creating", "Updating", "Deleting", "Unknown"})


class Cluster(Struct, frozen=True, kw_only=True):
    """A compute cluster. `why_not` is the reason why no job can use the cluster now, or "" if jobs
    can use it."""

    name: str
    id: str = ""
    region: str = ""
    size: str = ""
    low_priority: bool = False
    owner: str = ""  # the mark of the installation that created the cluster
    state: str = ""
    created_at: datetime | None = None
    most_nodes: int = 0
    idle: str = ""  # how long a node stays without a job, such as PT20M
    quota: str = ""  # the cluster's error about a quota
    why_not: str = ""


class Clusters:
    """Lists the compute clusters that the settings select, and their offers. An offer's zone is the
    name of its cluster. Offers of the setting `sizes` have no zone, because Cavvy creates a cluster
    when the first job needs it.
    """

    def __init__(self, api: WorkspaceApi, context: ProviderContext) -> None:
        self._mark = make_mark(context.installation)
        self._sizes = WorkspaceSizes(api, context, "azureml", _KIND)
        self._leftovers = LeftoverSearch()
        self._needed: dict[str, datetime] = {}  # own cluster -> when a launch last asked for it
        self._api, self._settings, self._now = api, context.settings, context.now
        self._list_prices = context.list_prices
        prices = str(context.settings.get("prices_endpoint") or "").rstrip("/")
        self._price_list = AzurePrices(base=prices, tries=1, timeout_s=10)
        self._catalog: tuple[datetime, Mapping[tuple[str, str], Offer]] | None = None
        # region -> when the prices were read, and the prices by size in lower case
        self._low: dict[str, tuple[datetime, Mapping[str, HourlyRate]]] = {}
        self._failed: tuple[datetime, PriceError] | None = None  # the last failed read
        self.known: Sequence[Cluster] = ()
        self.left_out: Mapping[str, str] = {}  # the reason by cluster

    async def offers(self) -> Sequence[Offer]:
        """Return one offer for each cluster whose machine type and price are known, and the offers
        of the sizes for which Cavvy creates clusters. Raises CloudFault, Refused.
        """
        patterns = list_setting(self._settings, "clusters")
        listed = await self._list()
        told = [
            each
            for each in listed
            if not each.owner and any(fnmatchcase(each.name, pattern) for pattern in patterns)
        ]
        found, left_out = await self._offer_sizes()
        for cluster in told:
            offer = cluster.why_not or await self._price(cluster)
            if isinstance(offer, str):
                left_out[cluster.name] = offer
            else:
                found.append(offer)
        self.known = [*told, *(each for each in listed if each.owner == self._mark)]
        self.left_out = left_out
        return found

    async def _list(self) -> Sequence[Cluster]:
        return [
            read_cluster(each)
            for each in await self._api.clusters()
            if (each.get("properties") or {}).get("computeType") == _KIND
        ]

    async def _offer_sizes(self) -> tuple[list[Offer], dict[str, str]]:
        """Return the offers of the setting `sizes`, and why offers are missing, by name."""
        if not list_setting(self._settings, "sizes"):
            return [], {}
        usual, left_out = await self._sizes.list(), dict(self._sizes.facts())
        low: Mapping[str, HourlyRate] = {}
        try:
            low = await self._read_low(await self._api.region()) if usual else {}
        except PriceError as error:
            left_out["sizes with low priority"] = f"the prices are unknown: {error}"
        rates = [(each, low.get(each.instance_type.lower())) for each in usual]
        return [*usual, *(self._lower(each, rate) for each, rate in rates if rate)], left_out

    async def prepare(self, offer: Offer) -> Cluster:
        """Return Cavvy's own cluster for an offer without a zone, and create it if it does not
        exist. Raises CloudFault with the status 425 until Azure has created the cluster.
        """
        low = offer.purchase is Purchase.SPOT
        priority = _LOW if low else "Dedicated"
        name = make_short_name(f"{self._mark} {offer.instance_type.lower()} {priority}")
        self._needed[name] = self._now()
        cluster = await self.find(name)
        if not cluster.id:
            await self._api.check_region(offer.region)
            await self._api.create_compute(name, self._make(offer, priority))
        if not cluster.id or (cluster.owner == self._mark and cluster.state in _BUSY):
            raise CloudFault(425, "ClusterCreating", f"Azure creates the compute cluster {name}")
        if cluster.owner != self._mark or cluster.low_priority != low:
            why_not = "a person has created or changed the cluster; delete it in Azure's studio"
            return replace(cluster, why_not=why_not)
        if cluster.why_not:  # Azure failed to create it; the next launch tries again
            await self._api.delete_compute(name)
        return cluster

    def _make(self, offer: Offer, priority: str) -> Mapping[str, Any]:
        """Return the body of the request that creates a cluster:
        https://learn.microsoft.com/rest/api/azureml/compute/create-or-update
        """
        return {
            "location": offer.region,
            "tags": {INSTALLATION: self._mark},
            "properties": {
                "computeType": _KIND,
                "disableLocalAuth": True,
                "properties": {
                    "vmSize": offer.instance_type,
                    "vmPriority": priority,
                    "osType": "Linux",
                    "remoteLoginPortPublicAccess": "Disabled",
                    "scaleSettings": {
                        "minNodeCount": 0,
                        "maxNodeCount": _MOST_NODES,
                        "nodeIdleTimeBeforeScaleDown": _IDLE,
                    },
                },
            },
        }

    async def remove_unused(self, used: Mapping[str, datetime | None]) -> None:
        """Delete Cavvy's own clusters that no job has used for an hour. `used` maps the clusters of
        jobs to the end of their last job, or to None while a job has not ended.
        """
        now = self._now()
        if not self._leftovers.is_due("", now):
            return
        since = now - UNUSED

        def is_old(cluster: Cluster) -> bool:
            times = (cluster.created_at, self._needed.get(cluster.name), used.get(cluster.name))
            unfinished = cluster.name in used and used[cluster.name] is None
            return not unfinished and all(each is None or each < since for each in times)

        with suppress(CloudFault):  # clusters without nodes cost nothing
            ours = [each for each in await self._list() if each.owner == self._mark]
            old = [each.name for each in ours if each.state != "Deleting" and is_old(each)]
            for name in old[:MOST_DELETED]:
                await self._api.delete_compute(name)
                self._needed.pop(name, None)

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
            rate = (await self._read_low(cluster.region)).get(machine.instance_type.lower())
        except PriceError as error:
            return f"the low-priority price is unknown: {error}"
        if rate is None:
            return f"Azure's price list has no low-priority price for {cluster.size}"
        return self._lower(offer, rate)

    def _lower(self, offer: Offer, rate: HourlyRate) -> Offer:
        """Return the offer with low priority instead of a dedicated machine."""
        source = f"{self._price_list.title}, low priority"
        today = self._now().date()
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

    async def _read_low(self, region: str) -> Mapping[str, HourlyRate]:
        """Return the prices of a region's low-priority machines, by size in lower case. After an
        error, do not read Azure's price list for some minutes, because each read may take seconds.
        Raises PriceError.
        """
        now = self._now()
        if region not in self._low or now - self._low[region][0] >= _LOW_AGE:
            if self._failed is not None and now - self._failed[0] < _FAILED_AGE:
                raise self._failed[1]
            try:
                self._low[region] = now, await asyncio.to_thread(self._fetch_low, region)
            except PriceError as error:
                self._failed = now, error
                raise
        return self._low[region][1]

    def _fetch_low(self, region: str) -> Mapping[str, HourlyRate]:
        condition = (
            f"serviceName eq 'Virtual Machines' and armRegionName eq '{region}' and "
            "priceType eq 'Consumption' and contains(skuName, 'Low Priority')"
        )
        query = PriceQuery(
            machines={},
            today=self._now().date(),
            progress=lambda _: None,
            pause=lambda _: None,  # not called, because only one attempt is made
        )
        rates: dict[str, HourlyRate] = {}
        for each in self._price_list.list_items(condition, query):
            if (
                "Low Priority" in str(each.get("skuName"))
                and "Windows" not in str(each.get("productName"))
                and (each.get("currencyCode"), each.get("unitOfMeasure")) == ("USD", "1 Hour")
                and isinstance(each.get("retailPrice"), int | float)
            ):
                size, rate = str(each.get("armSkuName")).lower(), each["retailPrice"]
                # if one meter replaces another, the dearest counts, so that plans do not
                # understate costs
                rates[size] = max(rates.get(size, HourlyRate(0)), parse_rate(Decimal(str(rate))))
        return {size: rate for size, rate in rates.items() if rate.micros_per_hour}


def read_cluster(told: Json) -> Cluster:
    """Parse a compute target of the type AmlCompute."""
    outer: Mapping[str, Any] = told["properties"]
    inner: Mapping[str, Any] = outer.get("properties") or {}
    scale: Mapping[str, Any] = inner.get("scaleSettings") or {}
    faults = [*(inner.get("errors") or ()), *(outer.get("provisioningErrors") or ())]
    errors = [each.get("error") or each for each in faults]
    quota = next((each for each in errors if "quota" in str(each.get("code")).lower()), None)
    state = str(outer.get("provisioningState"))
    why_not = ""
    if state != "Succeeded":
        told_why = "; ".join(f"{each.get('code')}: {each.get('message')}" for each in errors)
        why_not = f"the provisioning state is {state} {told_why}".rstrip()
    elif str(inner.get("osType") or "Linux") != "Linux":
        why_not = f"the machines run {inner['osType']}; Linux is needed"
    return Cluster(
        name=str(told["name"]),
        id=str(told["id"]),
        region=str(outer.get("computeLocation") or told.get("location")).lower().replace(" ", ""),
        size=str(inner.get("vmSize") or ""),
        low_priority=inner.get("vmPriority") == _LOW,
        owner=str((told.get("tags") or {}).get(INSTALLATION) or ""),
        state=state,
        created_at=read_time(outer.get("createdOn")),
        most_nodes=int(scale.get("maxNodeCount") or 0),
        idle=str(scale.get("nodeIdleTimeBeforeScaleDown") or ""),
        quota=f"{quota.get('code')}: {quota.get('message')}" if quota else "",
        why_not=why_not,
    )


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

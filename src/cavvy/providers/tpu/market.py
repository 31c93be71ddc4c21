"""Combines the catalog's prices, one for each region, with the types of slices that the TPU API
lists for each zone. An offer is one host of a slice.

Reads the project's quotas of TPUs by zone, counts the slices that use them, and limits offers to
the unused quota.

The limits come from the Cloud Quotas API, which does not report usage
(https://cloud.google.com/docs/quotas/reference/rest/v1/projects.locations.services.quotaInfos, read
on 2026-11-24). The usage is the sum over all slices that the Cloud TPU API lists, including slices
that Cavvy did not create. Google publishes no list of quota names; the names in this module are
from Google's error messages.
"""

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta

from cavvy.catalog.tpu_slices import TpuSlice, find_slice
from cavvy.domain.offers import NEW_LIMIT, Offer, Purchase, Quota, limit_offer
from cavvy.domain.values import replace
from cavvy.providers.base import ProviderContext, Refused
from cavvy.providers.tpu.api import TpuApi
from cavvy.providers.vm.cloud import CloudFault
from cavvy.providers.vm.keys import list_setting
from cavvy.providers.vm.regions import QuotaCache, RegionalMarket, ask_regions
from cavvy.providers.vm.rest import Json

# Slices that Compute Engine rents too are in the catalog as offers of `gcp`.
_CATALOGS = ("gcp", "tpu")
_SOLD = (Purchase.ON_DEMAND, Purchase.SPOT)
# the size of the boot disk, which cannot be changed:
# https://cloud.google.com/tpu/docs/attach-durable-block-storage
_DISK_GIB = 100

# such as TPUV6EPerProjectPerZoneForTPUAPI, TPUV5PPreemptiblePerProjectPerZoneForTPUAPI and, for
# slices of v5e with one host, TPUV5sLitepodServingPerProjectPerZoneForTPUAPI
_QUOTA = re.compile(
    r"TPU(V\d+(?:sLitepod|[A-Z])?)(Preemptible)?(Serving)?PerProjectPerZoneForTPUAPI"
)
_GENERATIONS = {"V5sLitepod": "TPU-v5e"}  # the others are TPU- and the version in lower case

_Key = tuple[str, str, Purchase, bool]  # zone, accelerator, purchase, whether for serving
_Quotas = Mapping[_Key, Quota]


class TpuMarket(RegionalMarket):
    """Reads and caches offers."""

    age, again = timedelta(hours=12), timedelta(minutes=5)

    def __init__(self, api: TpuApi, context: ProviderContext) -> None:
        super().__init__(context)
        self._api = api

    async def _join(self) -> Sequence[Offer]:
        listed = [await asyncio.to_thread(self._list_prices, each) for each in _CATALOGS]
        rows = [row for each in listed for row in each]
        prices: dict[tuple[str, str], list[Offer]] = {}
        for row in rows:
            kind = find_slice(row.instance_type) if row.purchase in _SOLD else None
            if kind is not None:
                prices.setdefault((row.region, kind.type), []).append(row)
        priced = {region for region, _ in prices}
        zones = [each for each in await self._zones() if _region(each) in priced]
        found, self.silent = await ask_regions(zones, self._types)
        return [
            _make_offer(row, zone)
            for zone, name in found
            for row in prices.get((_region(zone), name), ())
        ]

    async def _zones(self) -> Sequence[str]:
        """Return the zones that have TPUs and that the settings select."""
        regions = list_setting(self._settings, "regions")
        zones = list_setting(self._settings, "zones")
        told, _ = await self._api.list("locations", "locations")
        return [
            zone
            for zone in sorted(str(each["locationId"]) for each in told)
            if (not zones or zone in zones) and (not regions or _region(zone) in regions)
        ]

    async def _types(self, zone: str) -> Sequence[tuple[str, str]]:
        """Return the types of slices that a zone has, each with the zone."""
        told, _ = await self._api.list(f"locations/{zone}/acceleratorTypes", "acceleratorTypes")
        return [(zone, name) for name in _names(told)]


def _names(told: Sequence[Mapping[str, object]]) -> Iterator[str]:
    for each in dict.fromkeys(str(each["type"]) for each in told):
        known = find_slice(each)
        if known is not None:
            yield known.type


def _region(zone: str) -> str:
    return zone.rpartition("-")[0]


def _make_offer(price: Offer, zone: str) -> Offer:
    """Return the offer of one host."""
    return replace(price, provider="tpu", zone=zone, disk_gib=_DISK_GIB, architecture="x86_64")


class TpuQuotas:
    """The quotas of one project, at most a minute old."""

    def __init__(self, api: TpuApi, now: Callable[[], datetime]) -> None:
        self._api = api
        self._cache = QuotaCache(self._ask, now)
        self.forget = self._cache.forget

    @property
    def problem(self) -> str:
        """The reason why the quotas could not be read, or "" if they were read."""
        fault = self._cache.faults.get("")
        return f"cannot be read: {fault}" if fault is not None else ""

    async def read(self) -> Sequence[Quota]:
        """Return all quotas, sorted by zone and name. Raises CloudFault, Refused."""
        known = await self._cache.read("")
        return sorted(known.values(), key=lambda each: (each.zone, each.name))

    async def limit(self, offers: Sequence[Offer]) -> Sequence[Offer]:
        """Return the offers, with their capacity reduced to the unused quota. If the quotas cannot
        be read, the last known quotas are used.
        """
        try:
            known = await self._cache.read("")
        except (CloudFault, Refused):
            known = self._cache.last("")
        return [limit_offer(each, _list_needs(each, known)) for each in offers]

    async def _ask(self, everywhere: str) -> _Quotas:
        project = await self._api.project()
        listed = await self._api.list_quotas()
        nodes, _ = await self._api.list("locations/-/nodes", "nodes")
        found = {key: quota for each in listed for key, quota in _read(each, project)}
        used: Counter[_Key] = Counter()
        for each in nodes:
            kind = find_slice(str(each.get("acceleratorType") or ""))
            if kind is not None and each["state"] != "DELETING":
                spot = bool((each.get("schedulingConfig") or {}).get("spot"))
                zone = str(each["name"]).split("/")[3]
                used[_find_key(zone, kind, spot, found)] += _count(kind)
        return {key: replace(each, used=float(used[key])) for key, each in found.items()}


def _read(told: Json, project: str) -> Iterator[tuple[_Key, Quota]]:
    """Yield the quotas of one kind of TPU in each zone. Other quotas are omitted."""
    name = str(told["quotaId"])
    match = _QUOTA.fullmatch(name)
    if match is None:
        return
    accelerator = _GENERATIONS.get(match[1]) or f"TPU-{match[1].lower()}"
    purchase = Purchase.SPOT if match[2] else Purchase.ON_DEMAND
    for zone, limit in _list_limits(told.get("dimensionsInfos") or ()).items():
        yield (
            (zone, accelerator, purchase, bool(match[3])),
            Quota(
                provider="tpu",
                name=name,
                family=str(told.get("quotaDisplayName") or accelerator),
                unit="cores",
                region=zone.rpartition("-")[0],
                zone=zone,
                purchase=purchase,
                limit=limit,
                request="gcloud quotas preferences create --service=tpu.googleapis.com "
                f"--project={project} --quota-id={name} --preferred-value={NEW_LIMIT} "
                f"--dimensions=zone={zone}",
            ),
        )


def _list_limits(told: Sequence[Json]) -> Mapping[str, float]:
    """Return the limit in each zone. An entry for a zone replaces an entry for all zones."""
    found: dict[str, float] = {}
    for each in sorted(told, key=lambda each: bool(each.get("dimensions"))):
        own = (each.get("dimensions") or {}).get("zone")
        limit = float((each.get("details") or {}).get("value") or 0)
        for zone in [own] if own else each.get("applicableLocations") or ():
            found[str(zone)] = limit
    return found


def _find_key(zone: str, kind: TpuSlice, spot: bool, known: _Quotas) -> _Key:
    """Return the quota that a slice uses. A slice of one host uses the quota for serving, if the
    zone has such a quota.
    """
    purchase = Purchase.SPOT if spot else Purchase.ON_DEMAND
    serving = (zone, kind.accelerator, purchase, True)
    if kind.hosts == 1 and serving in known:
        return serving
    return zone, kind.accelerator, purchase, False


def _count(kind: TpuSlice) -> int:
    """Return the number of cores that a slice of this type uses of the quota. A slice type's name
    ends with the number of cores, as in "v5p-8". The chips of v5e and v6e have one core each.
    """
    return int(kind.type.rpartition("-")[2])


def _list_needs(offer: Offer, known: _Quotas) -> Iterator[tuple[Quota, float]]:
    """Return the quota that a host of the offer uses, and how much of the quota the host uses."""
    kind = find_slice(offer.instance_type)
    if kind is None or offer.zone is None:
        return
    key = _find_key(offer.zone, kind, offer.purchase is Purchase.SPOT, known)
    if key in known:
        yield known[key], _count(kind) / kind.hosts

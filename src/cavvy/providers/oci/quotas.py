"""Reads the tenancy's compute limits and the use of these limits, and reduces the offers' capacity
to the unused quota.

Each shape lists the names of the limits that apply to its instances; most limits are for one
availability domain. On-demand and preemptible instances count toward the limits in the same way.
The facts in this module were read on 2026-11-23 in OCI's documentation of the Limits API
(https://docs.oracle.com/en-us/iaas/api/#/en/limits/20181025/), of the names and units of limits
(https://docs.oracle.com/en-us/iaas/Content/Quotas/Concepts/resourcequotas_topic-Compute_Quotas.htm)
and of preemptible instances
(https://docs.oracle.com/en-us/iaas/Content/Compute/Concepts/capacity-types.htm).
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

from cavvy.domain.offers import Offer
from cavvy.domain.quotas import NEW_LIMIT, Quota, limit_offer
from cavvy.providers.base import Refused
from cavvy.providers.oci.api import LIMITS, OciApi
from cavvy.providers.oci.market import OciMarket, shape_of
from cavvy.providers.vm.cloud import CloudFault
from cavvy.providers.vm.regions import QuotaCache, ask_regions
from cavvy.providers.vm.rest import Json

_SERVICE = "compute"

# (name, availability domain or "") -> quota; the domain is "" for a limit of the whole region
_Quotas = Mapping[tuple[str, str], Quota]


class OciQuotas:
    """The quotas of one tenancy by region, each at most a minute old."""

    def __init__(
        self,
        api: OciApi,
        market: OciMarket,
        tenancy: Callable[[], str],
        now: Callable[[], datetime],
    ) -> None:
        """`tenancy` returns the OCID of the tenancy. Raises Refused."""
        self._api, self._market, self._tenancy = api, market, tenancy
        self._cache = QuotaCache(self._read_anew, now)
        self.forget = self._cache.forget
        # the regions that did not answer the last `limit`, and the last `read`, with the reason
        self.silent: Sequence[str] = ()
        self.untold: Sequence[str] = ()

    async def read(self) -> Sequence[Quota]:
        """Return the quotas of all regions that answer, sorted by region, name and availability
        domain. Raises CloudFault or Refused if no region answers. If a region's quotas cannot be
        read, the request is repeated after a minute at the earliest.
        """
        await self._market.offers()
        found, self.untold = await ask_regions(await self._market.regions(), self._read)
        return sorted(found, key=lambda each: (each.region, each.name, each.zone))

    async def limit(self, offers: Sequence[Offer]) -> Sequence[Offer]:
        """Return the offers, with their capacity reduced to the unused quota. If the quotas of a
        region cannot be read, the last known quotas are used.
        """
        try:
            _, self.silent = await ask_regions(await self._market.regions(), self._read)
        except (CloudFault, Refused) as fault:
            self.silent = [f"all regions: {fault}"]
        return [limit_offer(offer, self._list_needs(offer)) for offer in offers]

    def _list_needs(self, offer: Offer) -> Sequence[tuple[Quota, float]]:
        """Return the quotas that an instance of the offer uses, each with the amount."""
        known = self._cache.last(offer.region)
        shape = self._market.shapes.get((offer.region, offer.zone or "", shape_of(offer)), {})
        return [
            (known[name, zone], _count(known[name, zone].unit, offer, shape))
            for name in shape.get("quotaNames") or ()
            for zone in (offer.zone or "", "")
            if (name, zone) in known
        ]

    async def _read(self, region: str) -> Sequence[Quota]:
        return list((await self._cache.read(region)).values())

    async def _read_anew(self, region: str) -> _Quotas:
        tenancy = await asyncio.to_thread(self._tenancy)
        told = await self._api.list(
            region, "/limitValues", LIMITS, compartmentId=tenancy, serviceName=_SERVICE
        )
        shapes = self._list_shapes(region)
        wanted = [each for each in told if shapes.get(each["name"]) and _unit(each["name"])]
        found = await asyncio.gather(
            *(self._make(region, tenancy, each, shapes[each["name"]]) for each in wanted)
        )
        return {(each.name, each.zone): each for each in found}

    def _list_shapes(self, region: str) -> Mapping[str, Sequence[str]]:
        """Return, for each limit, the names of the offered shapes that count toward the limit."""
        found: dict[str, set[str]] = {}
        for (place, _, shape), told in self._market.shapes.items():
            if place == region:
                for name in told.get("quotaNames") or ():
                    found.setdefault(name, set()).add(shape)
        return {name: sorted(shapes) for name, shapes in found.items()}

    async def _make(self, region: str, tenancy: str, told: Json, shapes: Sequence[str]) -> Quota:
        name, zone = str(told["name"]), str(told.get("availabilityDomain") or "")
        limit = float(told["value"])
        limit, used = await self._read_use(region, name, zone, limit) if limit else (0.0, 0.0)
        item = {"serviceName": _SERVICE, "limitName": name, "region": region}
        items = json.dumps([{**item, **({"scope": zone} if zone else {}), "value": NEW_LIMIT}])
        return Quota(
            provider="oci",
            name=name,
            family=", ".join(shapes),
            unit=_unit(name),
            region=region,
            zone=zone,
            limit=limit,
            used=used,
            # a command of Oracle's command line 3.95.1; `value` is a number, and so has no
            # quotation marks
            request=f"oci limits-increase limits-increase-request create "
            f"--compartment-id {tenancy} --display-name cavvy-{name} --justification 'GPU jobs' "
            f"--items '{items.replace(json.dumps(NEW_LIMIT), NEW_LIMIT)}'",
        )

    async def _read_use(
        self, region: str, name: str, zone: str, limit: float
    ) -> tuple[float, float | None]:
        """Return the limit that applies in the instances' compartment, and the part of the limit
        that new instances cannot use. This part is None if OCI does not report the use of the
        limit. A quota policy can reduce the limit in the compartment, and instances in the
        tenancy's other compartments also use the limit.
        """
        query = {"compartmentId": await self._market.compartment()}
        query |= {"availabilityDomain": zone} if zone else {}
        path = f"/services/{_SERVICE}/limits/{name}/resourceAvailability"
        try:
            told = await self._api.get(region, path, LIMITS, **query)
        except CloudFault as fault:
            if fault.status != 404:  # OCI reports no use of some limits
                raise
            return limit, None
        if told.get("effectiveQuotaValue") is not None:
            limit = min(limit, float(told["effectiveQuotaValue"]))
        if told.get("available") is None:
            return limit, None
        # more may be in use than a limit that was lowered later allows
        return limit, max(0.0, limit - float(told["available"]))


def _unit(name: str) -> str:
    """Return the unit that a limit's name implies, or "" if the name implies no unit."""
    if name.startswith("gpu"):
        return "GPUs"
    if "-memory-" in name:
        return "GB"
    if "-core-" in name:
        return "OCPUs"
    return "instances" if name.startswith(("vm-", "bm-")) else ""


def _count(unit: str, offer: Offer, shape: Json) -> float:
    """Return the amount of a limit, in `unit`, that one instance of the shape uses."""
    flexible = bool(shape.get("isFlexible"))
    match unit:
        case "GPUs":
            return float(offer.accelerator_count)
        case "GB":
            return offer.memory_mib / 1024 if flexible else float(shape["memoryInGBs"])
        case "OCPUs":
            # an OCPU is two vCPUs, except on Ampere A1:
            # https://docs.oracle.com/en-us/iaas/Content/Compute/References/computeshapes.htm
            per_core = 1 if ".A1." in offer.instance_type else 2
            return offer.vcpus / per_core if flexible else float(shape["ocpus"])
        case _:
            return 1.0

"""Combines the shapes that OCI lists for each availability domain with the catalog's prices.

OCI charges the same prices in all of OCI's commercial regions
(https://www.oracle.com/cloud/price-list/).

Finds the subnet and the image of an instance, from the settings or from the defaults.

Reads the tenancy's compute limits and the use of these limits, and reduces the offers' capacity
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
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta

from cavvy.catalog.accelerators import Vendor, find_accelerator
from cavvy.domain.offers import NEW_LIMIT, Offer, Purchase, Quota, limit_offer
from cavvy.domain.tasks import Scalar
from cavvy.domain.values import replace
from cavvy.providers.base import GangSpec, ProviderContext, Refused
from cavvy.providers.oci.api import IDENTITY, LIMITS, OciApi, OciCredentials
from cavvy.providers.vm.cloud import CloudFault
from cavvy.providers.vm.keys import list_setting
from cavvy.providers.vm.regions import QuotaCache, RegionalMarket, ask_regions
from cavvy.providers.vm.rest import Json

# "Announcing per-second billing for Compute and Autonomous Database", Oracle's blog
_MINIMUM = timedelta(minutes=1)
_MINIMUM_BARE_METAL = timedelta(hours=1)
_SOLD = (Purchase.ON_DEMAND, Purchase.SPOT)

# Names of platform images: https://docs.oracle.com/en-us/iaas/images/. The GPU builds of Oracle
# Linux contain NVIDIA's driver.
_UBUNTU = re.compile(r"Canonical-Ubuntu-24\.04-(aarch64-)?\d.*")
_GPU = re.compile(r"Oracle-Linux-\d.*-GPU-.*")


# A person may replace the subnet or an image, and Oracle publishes new platform images every month.
_AGE = timedelta(hours=1)

_SERVICE = "compute"

# (name, availability domain or "") -> quota; the domain is "" for a limit of the whole region
_Quotas = Mapping[tuple[str, str], Quota]


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


class OciPlaces:
    """Finds subnets and images, and caches them for `_AGE`. Methods raise CloudFault and
    Refused."""

    def __init__(
        self,
        api: OciApi,
        settings: Mapping[str, Scalar],
        market: OciMarket,
        now: Callable[[], datetime],
    ) -> None:
        self._api, self._settings, self._market, self._now = api, settings, market, now
        self._since = now()
        self._subnets: dict[tuple[str, str | None], Json] = {}
        self._images: dict[tuple[str, str, str], str] = {}

    def forget(self) -> None:
        """Drop the cached subnets and images, because a cached subnet or image may have been
        deleted.
        """
        self._subnets.clear()
        self._images.clear()
        self._since = self._now()

    async def subnet(self, offer: Offer) -> Json:
        """Return the subnet of an instance in the offer's availability domain."""
        self._forget_old()
        place = offer.region, offer.zone
        if place not in self._subnets:
            self._subnets[place] = await self._find_subnet(offer)
        return self._subnets[place]

    async def image(self, gang: GangSpec) -> str:
        """Return the OCID of the image of the gang's instances."""
        named = str(gang.options.get("image") or self._settings.get("image") or "")
        if named.startswith("ocid1.image."):
            return named
        self._forget_old()
        place = gang.offer.region, shape_of(gang.offer), named
        if place not in self._images:
            self._images[place] = await self._find_image(gang.offer, named)
        return self._images[place]

    def _forget_old(self) -> None:
        if self._now() - self._since >= _AGE:
            self.forget()

    async def _find_subnet(self, offer: Offer) -> Json:
        wanted = str(self._settings.get("subnet") or "")
        compartment = str(self._settings.get("network_compartment") or "")
        told = await self._api.list(
            offer.region,
            "/subnets",
            compartmentId=compartment or await self._market.compartment(),
            lifecycleState="AVAILABLE",
        )
        # a regional subnet serves all availability domains
        usable = [each for each in told if each.get("availabilityDomain") in (None, offer.zone)]
        if wanted:
            usable = [each for each in usable if wanted in (each["id"], each["displayName"])]
        if len(usable) == 1:
            return usable[0]
        names = ", ".join(sorted(str(each["displayName"]) for each in usable))
        problem = f"has several: {names}; choose one" if usable else "has none"
        raise Refused(
            f"[providers.oci] subnet: {offer.region} needs one "
            f"subnet{f' {wanted}' * bool(wanted)} in the compartment, and {problem}; the "
            "console's wizard `VCN with Internet Connectivity` creates a network"
        )

    async def _find_image(self, offer: Offer, named: str) -> str:
        query = {"compartmentId": await self._market.compartment(), "lifecycleState": "AVAILABLE"}
        if named:
            told = await self._api.list(offer.region, "/images", displayName=named, **query)
            return _first(told, offer, f"called {named}")
        pattern, system = find_default(offer)
        newest = {"sortBy": "TIMECREATED", "sortOrder": "DESC", "shape": shape_of(offer)}
        told = await self._api.list(offer.region, "/images", **query, **newest, **system)
        fitting = [each for each in told if pattern.fullmatch(str(each["displayName"]))]
        return _first(fitting, offer, f"of {system['operatingSystem']}")


def shape_of(offer: Offer) -> str:
    """Return OCI's name for the shape, without the size that the catalog adds to the names of
    flexible shapes."""
    return offer.instance_type.partition("$")[0]


def find_default(offer: Offer) -> tuple[re.Pattern[str], Mapping[str, str]]:
    """Return a pattern for the name of OCI's own image that has drivers for the offer, and the
    query for the image's operating system. Raises Refused if OCI has no image with a driver for the
    accelerator.
    """
    known = find_accelerator(offer.accelerator or "")
    if known is None:
        return _UBUNTU, {
            "operatingSystem": "Canonical Ubuntu",
            "operatingSystemVersion": "24.04",
        }
    if known.accelerator.vendor is Vendor.NVIDIA:
        return _GPU, {"operatingSystem": "Oracle Linux"}
    raise Refused(
        f"image: OCI has no platform image with a driver for {known.accelerator.name} "
        f"({offer.instance_type}); name an image in the setting `image`, or in "
        "`resources.options` as `{oci: {image: OCID}}`"
    )


def _first(images: Sequence[Json], offer: Offer, what: str) -> str:
    if not images:
        raise Refused(
            f"[providers.oci] image: {offer.region} has no image {what} for {shape_of(offer)}; "
            "name an image in the setting `image`"
        )
    return str(images[0]["id"])


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

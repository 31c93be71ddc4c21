"""Combines the shapes that OCI lists for each availability domain with the catalog's prices.

OCI charges the same prices in all of OCI's commercial regions
(https://www.oracle.com/cloud/price-list/).

Finds the subnet and the image of an instance, from the settings or from the defaults.
"""

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta

from cavvy.catalog.accelerators import Vendor, find_accelerator
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.tasks import Scalar
from cavvy.domain.values import replace
from cavvy.providers.base import GangSpec, ProviderContext, Refused
from cavvy.providers.oci.api import IDENTITY, OciApi
from cavvy.providers.oci.credentials import OciCredentials
from cavvy.providers.vm.keys import list_setting
from cavvy.providers.vm.regions import RegionalMarket, ask_regions
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

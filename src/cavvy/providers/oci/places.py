"""Finds the subnet and the image of an instance, from the settings or from the defaults."""

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta

from cavvy.catalog.accelerators import Vendor, find_accelerator
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import Scalar
from cavvy.providers.base import GangSpec, Refused
from cavvy.providers.oci.api import OciApi
from cavvy.providers.oci.market import OciMarket
from cavvy.providers.vm.rest import Json

# Names of platform images: https://docs.oracle.com/en-us/iaas/images/. The GPU builds of Oracle
# Linux contain NVIDIA's driver.
_UBUNTU = re.compile(r"Canonical-Ubuntu-24\.04-(aarch64-)?\d.*")
_GPU = re.compile(r"Oracle-Linux-\d.*-GPU-.*")


# A person may replace the subnet or an image, and Oracle publishes new platform images every month.
_AGE = timedelta(hours=1)


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

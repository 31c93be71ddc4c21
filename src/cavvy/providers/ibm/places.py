"""Selects the subnet and the image of an instance, from the settings or else from IBM's lists."""

import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta

from cavvy.domain.offers import Offer
from cavvy.domain.tasks import Scalar
from cavvy.providers.base import GangSpec, Refused
from cavvy.providers.ibm.api import IbmApi
from cavvy.providers.ibm.bare_metal import is_bare_metal
from cavvy.providers.vm.rest import Json

# Names of IBM's images: https://cloud.ibm.com/docs/vpc?topic=vpc-about-images
_UBUNTU = r"ibm-ubuntu-{release}(-\d+)?-minimal-amd64-\d+"
_IMAGE_ID = re.compile(r"r\d{3}-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")

NO_SUBNET = "create a VPC with a public gateway and a subnet in the zone, or choose other regions"

# A person may replace the subnet or an image, and IBM publishes new images every month.
_AGE = timedelta(hours=1)


class IbmPlaces:
    """Finds subnets and images, and caches them for the time `_AGE`. Methods raise CloudFault and
    Refused.
    """

    def __init__(
        self, api: IbmApi, settings: Mapping[str, Scalar], now: Callable[[], datetime]
    ) -> None:
        self._api, self._settings, self._now = api, settings, now
        self._since = now()
        self._subnets: dict[str, Sequence[Json]] = {}  # by region
        self._images: dict[tuple[str, str], str] = {}

    def forget(self) -> None:
        """Discard the cached subnets and images, because a subnet or an image may have been
        deleted.
        """
        self._subnets.clear()
        self._images.clear()
        self._since = self._now()

    async def zones(self, region: str) -> Sequence[str]:
        """Return the zones of a region that have a subnet for instances."""
        return sorted({str(each["zone"]["name"]) for each in await self._list_subnets(region)})

    async def subnet(self, offer: Offer) -> Json:
        """Return the subnet of an instance in the offer's zone."""
        told = await self._list_subnets(offer.region)
        usable = [each for each in told if each["zone"]["name"] == offer.zone]
        if len(usable) == 1:
            return usable[0]
        names = ", ".join(sorted(str(each["name"]) for each in usable))
        problem = f"several: {names}; choose one in `subnet`" if usable else f"none; {NO_SUBNET}"
        raise Refused(f"[providers.ibm] subnet: {offer.zone} needs one subnet, but has {problem}")

    async def image(self, gang: GangSpec) -> str:
        """Return the id of the image that the gang's instances boot."""
        named = str(gang.options.get("image") or self._settings.get("image") or "")
        if _IMAGE_ID.fullmatch(named):
            return named
        if not named:
            check_default_image(gang.offer)
        self._forget_old()
        place = gang.offer.region, named or _release_for(gang.offer)
        if place not in self._images:
            self._images[place] = await self._find_image(gang.offer, named)
        return self._images[place]

    def _forget_old(self) -> None:
        if self._now() - self._since >= _AGE:
            self.forget()

    async def _list_subnets(self, region: str) -> Sequence[Json]:
        """Return the region's subnets that instances can use."""
        self._forget_old()
        if region not in self._subnets:
            wanted = str(self._settings.get("subnet") or "")
            told = await self._api.list(region, "/subnets", "subnets")
            self._subnets[region] = [
                each
                for each in told
                if each["status"] == "available" and wanted in ("", each["id"], each["name"])
            ]
        return self._subnets[region]

    async def _find_image(self, offer: Offer, named: str) -> str:
        if named:
            told = await self._api.list(offer.region, "/images", "images", name=named)
            return _choose(told, offer, f"called {named}")
        told = await self._api.list(offer.region, "/images", "images", visibility="public")
        release = _release_for(offer)
        pattern = _UBUNTU.replace("{release}", release)
        fitting = [each for each in told if re.fullmatch(pattern, str(each["name"]))]
        return _choose(fitting, offer, f"of Ubuntu {release.replace('-', '.')}")


def _release_for(offer: Offer) -> str:
    """Return the Ubuntu release to look for in image names. The newest release that IBM lists for
    bare metal is 22.04 (https://cloud.ibm.com/docs/vpc?topic=vpc-bare-metal-image, of 2025-12-18).
    """
    return "22-04" if is_bare_metal(offer.instance_type) else "24-04"


def check_default_image(offer: Offer) -> None:
    """Raise Refused if IBM has no image with a driver for the offer."""
    if offer.accelerator is not None:
        raise Refused(
            f"image: IBM has no image with a driver for {offer.accelerator} "
            f"({offer.instance_type}); name your own image in the setting `image`, or in "
            "`resources.options` as `{ibm: {image: NAME}}`"
        )


def _choose(images: Sequence[Json], offer: Offer, what: str) -> str:
    """Return the id of the newest usable image in `images`."""
    usable = [each for each in images if each["status"] in ("available", "deprecated")]
    if not usable:
        raise Refused(
            f"[providers.ibm] image: {offer.region} has no available image {what}; name one in the "
            "setting `image`"
        )
    newest = max(usable, key=lambda each: datetime.fromisoformat(each["created_at"]))
    return str(newest["id"])

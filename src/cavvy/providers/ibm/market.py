"""Combines the profiles that the VPC API lists with the prices in IBM's Global Catalog, which is
public (https://cloud.ibm.com/apidocs/resource-catalog/global-catalog). If the Global Catalog
contains only prices for the parts of a profile, the catalog's price is used.

In the Global Catalog, each profile (a machine type) has a plan (an entry with prices). The plan has
the same name as its profile, and its prices differ by region. This module does not read the prices
of the older profiles gx2 and bx2, which IBM sells in parts under one plan.

Selects the subnet and the image of an instance, from the settings or else from IBM's lists.
"""

import asyncio
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from decimal import Decimal
from itertools import product
from urllib.parse import quote

from cavvy.catalog.accelerators import KnownAccelerator, identify
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.tasks import Scalar
from cavvy.domain.units import HourlyRate, parse_rate
from cavvy.providers.base import GangSpec, ProviderContext, Refused
from cavvy.providers.ibm import bare_metal
from cavvy.providers.ibm.api import IbmApi
from cavvy.providers.ibm.bare_metal import is_bare_metal
from cavvy.providers.vm.cloud import CloudFault
from cavvy.providers.vm.keys import list_setting
from cavvy.providers.vm.regions import RegionalMarket, ask_regions
from cavvy.providers.vm.rest import Json, RestClient

_PRICES_AGE = timedelta(days=1)
_CLASSES = {Purchase.ON_DEMAND: "standard", Purchase.SPOT: "spot"}
_ARCHITECTURES = {"amd64": "x86_64"}
_SERVICES = ("is.instance", "is.bare-metal-server")
_PAGE = 50  # the catalog returns at most this many entries
_METRICS = {  # the start of the id of the metric that has the price of an instance for one hour
    Purchase.ON_DEMAND: "part-is.instance-hours-",
    Purchase.SPOT: "part-is.spot-",
}
_SERVER_HOURS = "BARE_METAL_SERVER_HOURS"  # the unit of the price of a bare metal server, per hour

ProfilePrices = Mapping[tuple[str, str, Purchase], HourlyRate]  # by profile, region and purchase

# Names of IBM's images: https://cloud.ibm.com/docs/vpc?topic=vpc-about-images
_UBUNTU = r"ibm-ubuntu-{release}(-\d+)?-minimal-amd64-\d+"
_IMAGE_ID = re.compile(r"r\d{3}-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")

NO_SUBNET = "create a VPC with a public gateway and a subnet in the zone, or choose other regions"

# A person may replace the subnet or an image, and IBM publishes new images every month.
_AGE = timedelta(hours=1)


class IbmMarket(RegionalMarket):
    """Reads and caches offers."""

    def __init__(self, api: IbmApi, context: ProviderContext) -> None:
        super().__init__(context)
        self._api = api
        self._list = IbmPrices(context.settings)
        self.close = self._list.close
        self.regions = list_setting(context.settings, "regions")
        self.bare_metal = list_setting(context.settings, "bare_metal_profiles")
        self._prices: tuple[datetime, Sequence[str], ProfilePrices] | None = None
        self.unpriced: Sequence[str] = ()  # profiles that have no price in some region
        self.unknown: Sequence[str] = ()  # models of GPUs that are not in the catalog

    async def _join(self) -> Sequence[Offer]:
        told, self.silent = await ask_regions(self.regions, self._list_profiles)
        prices = await self._read_prices(sorted({str(profile["name"]) for _, profile in told}))
        known = await asyncio.to_thread(self._list_prices, "ibm")
        stored = {(each.instance_type, each.region, each.purchase): each.rate for each in known}
        found: list[Offer] = []
        unpriced, unknown = set(), set()
        for region, profile in told:
            model, accelerator = _identify(profile)
            if model and accelerator is None:
                unknown.add(model)
                continue
            offers = list(self._make_offers(region, profile, accelerator, {**stored, **prices}))
            metal = bare_metal.is_bare_metal(str(profile["name"]))
            if metal:
                offers = [bare_metal.to_server(each, profile) for each in offers]
            found += offers
            if not offers and (model or metal):
                unpriced.add(f"{profile['name']} ({region})")
        self.unpriced, self.unknown = sorted(unpriced), sorted(unknown)
        return found

    async def _list_profiles(self, region: str) -> Sequence[tuple[str, Json]]:
        """Return the profiles to offer in a region, as pairs (region, profile). Profiles of bare
        metal servers are converted to the form of instances' profiles.
        """
        plain = list_setting(self._settings, "cpu_profiles")
        listed = await self._api.list(region, "/instance/profiles", "profiles")
        wanted = [
            each for each in listed if _read_fixed(each.get("gpu_count")) or each["name"] in plain
        ]
        if self.bare_metal:
            servers = await self._api.list(region, "/bare_metal_server/profiles", "profiles")
            named = [each for each in servers if each["name"] in self.bare_metal]
            wanted += map(bare_metal.to_instance_profile, named)
        return [(region, each) for each in wanted]

    async def _read_prices(self, profiles: Sequence[str]) -> ProfilePrices:
        known = self._prices
        if known is None or self._now() - known[0] >= _PRICES_AGE or known[1] != profiles:
            known = self._prices = self._now(), profiles, await self._list.read(profiles)
        return known[2]

    def _make_offers(
        self,
        region: str,
        profile: Json,
        known: KnownAccelerator | None,
        prices: Mapping[tuple[str, str, Purchase], HourlyRate],
    ) -> Iterator[Offer]:
        name, gpus = str(profile["name"]), _read_fixed(profile.get("gpu_count")) if known else 0
        classes = profile.get("availability_class") or {}
        allowed = classes.get("values") or [classes.get("value") or "standard"]
        architecture = str(profile["vcpu_architecture"]["value"])
        for purchase, zone in product(_CLASSES, profile["zones"]):
            rate = prices.get((name, region, purchase))
            if rate is None or _CLASSES[purchase] not in allowed:
                continue
            yield Offer(
                provider="ibm",
                region=region,
                zone=str(zone["name"]),
                instance_type=name,
                accelerator=known.accelerator.name if known else None,
                accelerator_count=gpus,
                accelerator_memory_mib=(known.memory_mib or 0) if known else 0,
                vcpus=_read_fixed(profile["vcpu_count"]),
                memory_mib=_read_fixed(profile["memory"]) * 1024,
                network_mbps=_read_fixed(profile.get("bandwidth")) or None,
                purchase=purchase,
                rate=rate,
                architecture=_ARCHITECTURES.get(architecture, architecture),
                source="IBM's VPC API, IBM's Global Catalog, and Cavvy's catalog",
                as_of=self._now().date(),
            )


def _read_fixed(field: Json) -> int:
    """Return the value of a profile's field, or 0 if the field is missing or has several values."""
    return int((field or {}).get("value") or 0)


def _identify(profile: Json) -> tuple[str, KnownAccelerator | None]:
    """Return IBM's name of the profile's GPU, and the catalog's entry for this GPU. The name is ""
    if the profile has no GPU; the entry is None if the GPU is not in the catalog."""
    gpus = _read_fixed(profile.get("gpu_count"))
    if not gpus:
        return "", None
    models = (profile.get("gpu_model") or {}).get("values") or ["a GPU without a name"]
    # the memory is that of all GPUs
    memory_mib = _read_fixed(profile.get("gpu_memory")) * 1024 // gpus
    return str(models[0]), identify(str(models[0]), memory_mib or None)


class IbmPrices:
    """Calls the Global Catalog. Calls raise CloudFault."""

    def __init__(self, settings: Mapping[str, Scalar]) -> None:
        self._api = RestClient(str(settings["prices_endpoint"]), lambda: "", _read_error)
        self.close = self._api.close

    async def read(self, profiles: Collection[str]) -> ProfilePrices:
        """Return the prices of the given profiles; profiles that the catalog does not contain are
        omitted.
        """
        services = [
            service
            for service, wanted in zip(_SERVICES, (False, True), strict=True)
            if any(is_bare_metal(each) is wanted for each in profiles)
        ]
        lists = [await self._list_plans(each) for each in services]
        plans = [each for told in lists for each in told if each["name"] in profiles]
        # at the same time, because one by one may take longer than the control plane waits
        told = await asyncio.gather(*(self._read_plan(each) for each in plans))
        return {key: rate for prices in told for key, rate in prices.items()}

    async def _read_plan(self, plan: Json) -> ProfilePrices:
        name, path = str(plan["name"]), f"/{quote(str(plan['id']))}/pricing/deployment"
        found: dict[tuple[str, str, Purchase], HourlyRate] = {}
        for each in (await self._api.get(path))["resources"]:
            region = str(each.get("deployment_region") or each["deployment_location"])
            for purchase, usd in _read_metrics(name, each.get("metrics") or []):
                found[name, region, purchase] = parse_rate(usd)
        return found

    async def _list_plans(self, service: str) -> Sequence[Json]:
        query = quote(f"kind:service {service}")
        services = (await self._api.get(f"/?q={query}"))["resources"]
        ids = [str(each["id"]) for each in services if each["name"] == service]
        if not ids:
            raise CloudFault(404, "no prices", f"the Global Catalog has no service {service}")
        plans: list[Json] = []
        while True:
            path = f"/{quote(ids[0])}/plan?_limit={_PAGE}&_offset={len(plans)}"
            page = await self._api.get(path)
            plans += page["resources"]
            if not page["resources"] or len(plans) >= int(page["count"]):
                return plans


def _read_metrics(profile: str, metrics: Sequence[Json]) -> Sequence[tuple[Purchase, Decimal]]:
    """Return the prices in USD per hour for accounts in the USA, by purchase option. Metrics with
    the price 0 are left out, because IBM bills another metric in their place.
    """
    by_id = {str(each.get("metric_id")): each for each in metrics}
    priced = {purchase: by_id.get(start + profile, {}) for purchase, start in _METRICS.items()}
    if is_bare_metal(profile):
        servers = (each for each in metrics if each.get("charge_unit_name") == _SERVER_HOURS)
        priced = {Purchase.ON_DEMAND: next(servers, {})}
    found: list[tuple[Purchase, Decimal]] = []
    for purchase, metric in priced.items():
        for amount in metric.get("amounts") or []:
            if (amount.get("country"), amount.get("currency")) == ("USA", "USD"):
                usd = [Decimal(str(each["price"])) for each in amount.get("prices") or []]
                found += [(purchase, each) for each in usd[:1] if each > 0]
    return found


def _read_error(told: Json) -> tuple[str, str]:
    first = (told.get("errors") or [told])[0]
    return first["code"], first["message"]


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

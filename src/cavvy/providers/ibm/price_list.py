"""Reads the prices of profiles from IBM's Global Catalog, which is public
(https://cloud.ibm.com/apidocs/resource-catalog/global-catalog).

In the catalog, each profile (a machine type) has a plan (an entry with prices). The plan has the
same name as its profile, and its prices differ by region. This module does not read the prices of
the older profiles gx2 and bx2, which IBM sells in parts under one plan.
"""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from decimal import Decimal
from urllib.parse import quote

from cavvy.domain.offers import Purchase
from cavvy.domain.tasks import Scalar
from cavvy.domain.units import HourlyRate, parse_rate
from cavvy.providers.ibm.bare_metal import is_bare_metal
from cavvy.providers.vm.cloud import CloudFault
from cavvy.providers.vm.rest import Json, RestClient

_SERVICES = ("is.instance", "is.bare-metal-server")
_PAGE = 50  # the catalog returns at most this many entries
_METRICS = {  # the start of the id of the metric that has the price of an instance for one hour
    Purchase.ON_DEMAND: "part-is.instance-hours-",
    Purchase.SPOT: "part-is.spot-",
}
_SERVER_HOURS = "BARE_METAL_SERVER_HOURS"  # the unit of the price of a bare metal server, per hour

ProfilePrices = Mapping[tuple[str, str, Purchase], HourlyRate]  # by profile, region and purchase


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

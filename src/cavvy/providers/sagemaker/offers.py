"""Reads SageMaker's prices of instances from AWS's Price List API, and builds offers from these
prices.

Each row of the price list is the price of an instance type for one purpose. The field
`platoinstancetype` names the purpose: "Training" for training jobs, "Notebook" for notebook
instances, "Hosting" for endpoints.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from typing import Any

from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import replace
from cavvy.providers.aws.prices import read_hourly
from cavvy.providers.base import ProviderContext
from cavvy.providers.managed.aws import AwsService
from cavvy.providers.vm.keys import list_setting

# patterns of instance types with chips that SageMaker's default images have no driver for
_OTHER_CHIPS = ("ml.trn*", "ml.inf*")
_HOME = "us-east-1"  # one of the regions that serve the Price List API
_AGE = timedelta(hours=12)
_Rates = Mapping[str, HourlyRate]


class InstanceOffers:
    """The offers of a provider that rents SageMaker's instances for one purpose, such as
    "Training". The settings `instances` and `disk_gib` select the offers; prices are read again
    after 12 hours.
    """

    def __init__(self, aws: AwsService, context: ProviderContext, provider: str, use: str) -> None:
        self._aws, self._context, self._provider, self._use = aws, context, provider, use
        self._rates: dict[str, tuple[datetime, _Rates]] = {}  # by region: when they were read
        # types with a price that the catalog does not know, by the last call of `list`
        self._unknown: Sequence[str] = ()

    def facts(self) -> Sequence[tuple[str, str]]:
        """Return facts for `cavvy check`, which calls `list` first."""
        names = ", ".join(self._unknown)
        return [("instance types that are not in the catalog", names)] if names else []

    async def list(self, *purchases: Purchase) -> Sequence[Offer]:
        """Return one offer for each instance type, region and purchase option. Raises CloudFault,
        Refused."""
        found, unknown, now = [], set(), self._context.now()
        settings = self._context.settings
        patterns = list_setting(settings, "instances")
        for region in await self._aws.regions():
            rates = await self._read(region, now)
            names = [each for each in sorted(rates) if _chosen(each, patterns)]
            machines = await asyncio.to_thread(self._find_machines, names)
            for name, machine in machines.items():
                if machine is None:
                    unknown.add(name)
                    continue
                found += [
                    replace(
                        machine,
                        provider=self._provider,
                        region=region,
                        zone=None,
                        instance_type=name,
                        disk_gib=int(settings["disk_gib"]),
                        purchase=purchase,
                        rate=rates[name],
                        term_months=0,
                        capacity=None,
                        source=f"AWS Price List API, SageMaker {self._use.lower()}",
                        as_of=now.date(),
                    )
                    for purchase in purchases
                ]
        self._unknown = sorted(unknown)
        return found

    def _find_machines(self, names: Sequence[str]) -> Mapping[str, Offer | None]:
        """Return the catalog's offers of EC2 for instance types of SageMaker. The function reads
        files."""
        find = self._context.find_instance
        return {each: find("aws", each.removeprefix("ml.")) for each in names}

    async def _read(self, region: str, now: datetime) -> _Rates:
        """Return the hourly prices in USD by instance type, such as ml.g5.xlarge. Raises
        CloudFault."""
        at, rates = self._rates.get(region, (None, {}))
        if at is None or now - at >= _AGE:
            told = await self._aws.pages(
                _HOME,
                "get_products",
                "PriceList",
                service="pricing",
                ServiceCode="AmazonSageMaker",
                Filters=[
                    {"Type": "TERM_MATCH", "Field": name, "Value": value}
                    for name, value in (
                        ("regionCode", region),
                        ("productFamily", "ML Instance"),
                        ("platoinstancetype", self._use),
                    )
                ],
            )
            rates = read_rates([json.loads(str(each)) for each in told], self._use)
            self._rates[region] = (now, rates)
        return rates


def read_rates(products: Sequence[Any], use: str) -> _Rates:
    """Return the hourly prices of instances for one purpose, such as "Training"."""
    found: dict[str, HourlyRate] = {}
    for each in products:
        attributes = each.get("product", {}).get("attributes", {})
        # in some rows, the use follows the type in `instanceType`: ml.m5.large-Training
        name = attributes.get("instanceName") or attributes.get("instanceType") or ""
        name = str(name).partition(f"-{use}")[0]
        terms = each.get("terms", {}).get("OnDemand", {}).values()
        rate = next((rate for term in terms if (rate := read_hourly(term)) is not None), None)
        fits = attributes.get("platoinstancetype") == use
        if fits and name.startswith("ml.") and rate is not None:
            found[name] = rate
    return found


def _chosen(name: str, patterns: Sequence[str]) -> bool:
    """Return whether one of the patterns in the settings selects this instance type."""
    if patterns:
        return any(fnmatchcase(name, each) for each in patterns)
    return not any(fnmatchcase(name, each) for each in _OTHER_CHIPS)

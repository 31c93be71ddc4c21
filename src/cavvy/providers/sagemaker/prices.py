"""Reads SageMaker's prices of training instances from AWS's Price List API.

A row of the list is the price of a training instance if its `platoinstancetype` is "Training".
Rows with another value, such as "Hosting", are prices for other uses of the same instance type.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from cavvy.domain.units import HourlyRate
from cavvy.providers.aws.prices import read_hourly
from cavvy.providers.managed.aws import AwsService

_HOME = "us-east-1"  # one of the regions that serve the Price List API
_AGE = timedelta(hours=12)
_Rates = Mapping[str, HourlyRate]


class TrainingPrices:
    """The prices by region and instance type; a region's prices are read again after 12 hours."""

    def __init__(self, aws: AwsService) -> None:
        self._aws = aws
        self._read: dict[str, tuple[datetime, _Rates]] = {}

    async def rates(self, region: str, now: datetime) -> _Rates:
        """The hourly prices in USD by instance type, such as ml.g5.xlarge. Raises CloudFault."""
        at, rates = self._read.get(region, (None, {}))
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
                        ("platoinstancetype", "Training"),
                    )
                ],
            )
            rates = read_rates([json.loads(str(each)) for each in told])
            self._read[region] = (now, rates)
        return rates


def read_rates(products: Sequence[Any]) -> _Rates:
    """The hourly prices of the products that are training instances."""
    found: dict[str, HourlyRate] = {}
    for each in products:
        attributes = each.get("product", {}).get("attributes", {})
        # in some rows, the use follows the type in `instanceType`: ml.m5.large-Training
        name = attributes.get("instanceName") or attributes.get("instanceType") or ""
        name = str(name).partition("-Training")[0]
        terms = each.get("terms", {}).get("OnDemand", {}).values()
        rate = next((rate for term in terms if (rate := read_hourly(term)) is not None), None)
        training = attributes.get("platoinstancetype") == "Training"
        if training and name.startswith("ml.") and rate is not None:
            found[name] = rate
    return found

"""The offers of Vertex AI: Compute Engine's machines in the regions and at the prices of Vertex AI.

Vertex AI bills a standard machine at the price of Compute Engine plus a management fee. A spot
machine costs Compute Engine's spot price plus the fee of a standard machine. The fee is a fraction
of Compute Engine's standard price. Each row of `fees.csv` contains two prices for one component of
a machine: the component's price in a standard machine of Vertex AI, including the fee, and the fee
alone.
"""

import asyncio
import csv
import re
from collections.abc import Mapping, Sequence
from datetime import date, datetime, timedelta
from decimal import ROUND_HALF_UP, Decimal
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import Struct, replace
from cavvy.providers.base import ProviderContext, Refused
from cavvy.providers.formats.services.vertex import find_accelerator, is_custom_job_type
from cavvy.providers.vertex.api import VertexApi
from cavvy.providers.vm.keys import list_setting

_AGE = timedelta(minutes=10)
# Machines that Vertex AI starts as spot machines only:
# https://cloud.google.com/vertex-ai/docs/training/configure-compute
_SPOT_ONLY = re.compile(r"a3-highgpu-[124]g")
_FILE = Path(__file__).with_name("fees.csv")
_WHOLE = Decimal("0.001")


class VertexOffers:
    """The offers in the regions and for the machine types that the settings of `provider` name."""

    def __init__(self, context: ProviderContext, provider: str, api: VertexApi) -> None:
        self._settings, self._now = context.settings, context.now
        self._list_prices, self._provider, self._api = context.list_prices, provider, api
        self._read: tuple[datetime, Sequence[Offer]] | None = None

    def regions(self) -> Sequence[str]:
        """Return the regions that the settings name. Raises Refused."""
        found = list_setting(self._settings, "regions")
        if not found:
            reason = "not set; name at least one region"
            raise Refused(f"[providers.{self._provider}] regions: {reason}")
        return found

    def check_region(self, region: str) -> None:
        """Raise Refused if the region is not one of `regions`, because Cavvy would never list
        objects that it creates in such a region.
        """
        if region not in self.regions():
            raise Refused(f"the region {region} is not among the `regions` of the settings")

    async def list(self) -> Sequence[Offer]:
        """Return the offers. Offers older than ten minutes are computed again, because the catalog
        may have been refreshed.
        """
        now = self._now()
        if self._read is None or now - self._read[0] >= _AGE:
            # a missing right is reported before a plan relies on it
            await asyncio.gather(*(self._api.check(each) for each in self.regions()))
            self._read = now, self._price(await asyncio.to_thread(self._list_prices, "gcp"))
        return self._read[1]

    def _price(self, known: Sequence[Offer]) -> Sequence[Offer]:
        """Return the offers of Vertex AI, computed from the offers of Compute Engine."""
        regions, patterns = self.regions(), list_setting(self._settings, "machines")
        priced = add_fee([each for each in known if each.region in regions and _is_sold(each)])
        return [
            replace(each, provider=self._provider, zone=None, capacity=None)
            for each in priced
            if any(fnmatchcase(each.instance_type, pattern) for pattern in patterns)
            and not (
                each.purchase is Purchase.ON_DEMAND and _SPOT_ONLY.fullmatch(each.instance_type)
            )
        ]


def name_accelerator(offer: Offer) -> str | None:
    """Return Vertex AI's name for an offer's accelerator. Returns None if the offer has no
    accelerator, or Vertex AI has no name for the accelerator.
    """
    if offer.accelerator is None:
        return None
    return find_accelerator(offer.instance_type, offer.accelerator, offer.accelerator_memory_mib)


def _is_sold(offer: Offer) -> bool:
    """Return whether a custom job can use the machine of this Compute Engine offer."""
    sold = offer.purchase in (Purchase.ON_DEMAND, Purchase.SPOT) and offer.accelerator_part == 1
    if not sold or not is_custom_job_type(offer.instance_type):
        return False
    return offer.accelerator is None or name_accelerator(offer) is not None


class ManagementFee(Struct, frozen=True, kw_only=True):
    """The fee as a fraction of Compute Engine's standard price, such as 0.15."""

    part: Decimal
    source: str
    as_of: date


@cache
def read_fee() -> ManagementFee:
    """Return the management fee, computed from the table of fees. If components have different
    fees, the highest fee is returned, so that plans do not understate costs.
    """
    with _FILE.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    found = [
        ManagementFee(
            part=_part(Decimal(row["fee_usd"]), Decimal(row["vertex_usd"])),
            source=row["source"],
            as_of=date.fromisoformat(row["as_of"]),
        )
        for row in rows
    ]
    return max(found, key=lambda fee: fee.part)


def add_fee(offers: Sequence[Offer]) -> Sequence[Offer]:
    """Return the offers of Compute Engine at Vertex AI's prices. Spot offers whose machine has no
    standard price are omitted.
    """
    fee = read_fee()
    standard: Mapping[tuple[str, str], HourlyRate] = {
        (each.region, each.instance_type): each.rate
        for each in offers
        if each.purchase is Purchase.ON_DEMAND
    }
    return [
        replace(
            each,
            rate=HourlyRate(each.rate.micros_per_hour + _fee_of(standard[key], fee)),
            source=f"{each.source}, and {fee.part:.1%} management fee ({fee.source})",
            as_of=min(each.as_of or fee.as_of, fee.as_of),
        )
        for each in offers
        if (key := (each.region, each.instance_type)) in standard
    ]


def _fee_of(rate: HourlyRate, fee: ManagementFee) -> int:
    """Return the management fee on a standard price, in micro-dollars an hour, rounded half up."""
    return int((rate.micros_per_hour * fee.part).to_integral_value(ROUND_HALF_UP))


def _part(fee: Decimal, whole: Decimal) -> Decimal:
    return (fee / (whole - fee)).quantize(_WHOLE, ROUND_HALF_UP)

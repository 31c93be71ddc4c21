"""Derives Vertex AI's prices of machines from the catalog's prices of Compute Engine.

Vertex AI bills a standard machine at the price of Compute Engine plus a management fee. A spot
machine costs Compute Engine's spot price plus the fee of a standard machine. The fee is a fraction
of Compute Engine's standard price. Each row of `fees.csv` contains two prices for one component of
a machine: the component's price in a standard machine of Vertex AI, including the fee, and the fee
alone.
"""

import csv
from collections.abc import Mapping, Sequence
from datetime import date
from decimal import ROUND_HALF_UP, Decimal
from functools import cache
from pathlib import Path

from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import Struct, replace

_FILE = Path(__file__).with_name("fees.csv")
_WHOLE = Decimal("0.001")


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

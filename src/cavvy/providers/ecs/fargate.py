"""Builds offers from Fargate's sizes and the dated prices in `fargate.csv`.

Each row of the table has the prices of one vCPU and one GB for an hour, on Linux and x86, in one
region and for one capacity provider. AWS bills each second from the start of the image pull to the
end of the task, and at least one minute: https://aws.amazon.com/fargate/pricing/
"""

import csv
from collections.abc import Mapping, Sequence
from datetime import date, timedelta
from decimal import Decimal
from functools import cache
from pathlib import Path

from cavvy.domain.events import ChargeKind
from cavvy.domain.offers import ExtraPrice, Offer, Purchase
from cavvy.domain.units import parse_rate, parse_usd
from cavvy.domain.values import Struct
from cavvy.providers.formats.services.ecs import list_sizes

ON_DEMAND, SPOT = "FARGATE", "FARGATE_SPOT"  # ECS's names of Fargate's capacity providers
PURCHASES = {ON_DEMAND: Purchase.ON_DEMAND, SPOT: Purchase.SPOT}
_FILE = Path(__file__).with_name("fargate.csv")
_SHORTEST = timedelta(minutes=1)
_DISK_GIB = 20  # the disk that the price includes
# https://aws.amazon.com/vpc/pricing/, read on 2026-09-28 by a third party
_ADDRESS_USD_HR, _ADDRESS_AS_OF = "0.005", date(2026, 9, 28)


class FargatePrice(Struct, frozen=True, kw_only=True):
    """The prices in USD of one vCPU and of one GB of memory, per hour."""

    vcpu: Decimal
    gb: Decimal
    as_of: date
    source: str


@cache
def read_prices() -> Mapping[tuple[str, str], FargatePrice]:
    """Return the prices by region and capacity provider."""
    with _FILE.open(encoding="utf-8", newline="") as file:
        return {
            (row["region"], row["capacity"]): FargatePrice(
                vcpu=Decimal(row["vcpu_usd"]),
                gb=Decimal(row["gb_usd"]),
                as_of=date.fromisoformat(row["as_of"]),
                source=row["source"],
            )
            for row in csv.DictReader(file)
        }


def list_fargate(region: str, capacity: str, *, public_address: bool) -> Sequence[Offer] | str:
    """Return an offer for each size, or the reason why no offer exists. `public_address` states
    whether tasks get a public address, which is billed.
    """
    price = read_prices().get((region, capacity))
    if price is None:
        return f"the price of {capacity} in {region} is unknown"
    address = ExtraPrice(
        kind=ChargeKind.ADDRESS,
        price=parse_usd(_ADDRESS_USD_HR),
        usual=1,
        source="https://aws.amazon.com/vpc/pricing/",
        as_of=_ADDRESS_AS_OF,
    )
    return [
        Offer(
            provider="ecs",
            region=region,
            zone=capacity,
            instance_type=f"fargate-{cpus}x{memory_mib // 1024}",
            vcpus=cpus,
            memory_mib=memory_mib,
            disk_gib=_DISK_GIB,
            purchase=PURCHASES[capacity],
            rate=parse_rate(cpus * price.vcpu + memory_mib // 1024 * price.gb),
            minimum_charge=_SHORTEST,
            architecture="x86_64",
            extras=(address,) if public_address else (),
            source=price.source,
            as_of=price.as_of,
        )
        for cpus, memory_mib in list_sizes()
    ]

"""Reads the setting `capacity`, which lists the ECS capacity that Cavvy offers and states what it
costs.

An entry is `FARGATE`, `FARGATE_SPOT`, or the name of a capacity provider with an Auto Scaling group
of one instance type: `NAME=INSTANCE_TYPE`, `NAME=INSTANCE_TYPE/spot` or `NAME=INSTANCE_TYPE/paid`.

The offers of Fargate have the dated prices in `fargate.csv`. Each row of the table has the prices
of one vCPU and one GB for an hour, on Linux and x86, in one region and for one capacity provider.
AWS bills each second from the start of the image pull to the end of the task, and at least one
minute: https://aws.amazon.com/fargate/pricing/
"""

import asyncio
import csv
import re
from collections.abc import Mapping, Sequence
from datetime import date, timedelta
from decimal import Decimal
from functools import cache
from pathlib import Path

from cavvy.domain.events import ChargeKind
from cavvy.domain.offers import ExtraPrice, Offer, Purchase
from cavvy.domain.tasks import Scalar
from cavvy.domain.units import HourlyRate, parse_rate, parse_usd
from cavvy.domain.values import Struct, replace
from cavvy.providers.base import ProviderContext, Refused
from cavvy.providers.formats import is_ec2_container_type
from cavvy.providers.formats.services.ecs import list_sizes
from cavvy.providers.managed.aws import AwsService, Ec2Prices
from cavvy.providers.vm.keys import list_setting

_ENTRY = re.compile(r"(?P<name>[\w-]{1,255})=(?P<type>[a-z0-9-]+\.[a-z0-9-]+)(/(?P<kind>\w+))?")
_KINDS = (None, "spot", "paid")
_PAID = "the setting `capacity`: the instances are already paid for"
ON_DEMAND, SPOT = "FARGATE", "FARGATE_SPOT"  # ECS's names of Fargate's capacity providers
PURCHASES = {ON_DEMAND: Purchase.ON_DEMAND, SPOT: Purchase.SPOT}
_FILE = Path(__file__).with_name("fargate.csv")
_SHORTEST = timedelta(minutes=1)
_DISK_GIB = 20  # the disk that the price includes
# https://aws.amazon.com/vpc/pricing/, read on 2026-09-28 by a third party
_ADDRESS_USD_HR, _ADDRESS_AS_OF = "0.005", date(2026, 9, 28)


class Capacity(Struct, frozen=True, kw_only=True):
    """One entry of the setting `capacity`. `instance_type` is "" for Fargate. `paid` means that the
    instances are already paid for, so tasks cost nothing.
    """

    name: str  # the capacity provider's name
    instance_type: str = ""
    spot: bool = False
    paid: bool = False


def parse_capacity(settings: Mapping[str, Scalar]) -> Sequence[Capacity]:
    """Return the entries of the setting `capacity`. Raises Refused with the invalid entry in the
    message.
    """
    found = [_parse(each) for each in list_setting(settings, "capacity")]
    if not found:
        raise Refused(
            "[providers.ecs] capacity: not set; name the cluster's capacity to use, such as "
            "`FARGATE, FARGATE_SPOT, NAME=g5.xlarge`"
        )
    names = [each.name for each in found]
    if twice := sorted({each for each in names if names.count(each) > 1}):
        raise Refused(
            f"[providers.ecs] capacity: {twice[0]} is named twice; name each capacity provider "
            "once, with its instance type"
        )
    return found


def _parse(entry: str) -> Capacity:
    if entry in PURCHASES:
        return Capacity(name=entry)
    match = _ENTRY.fullmatch(entry)
    if match is None or match["kind"] not in _KINDS:
        raise Refused(
            f"[providers.ecs] capacity: {entry!r} is not FARGATE, FARGATE_SPOT or "
            "NAME=INSTANCE_TYPE, optionally followed by /spot or /paid, such as "
            "`gpu-spot=g5.xlarge/spot`"
        )
    if not is_ec2_container_type(match["type"]):
        raise Refused(
            f"[providers.ecs] capacity: {entry!r}: Cavvy runs tasks only on types with an x86 CPU "
            "and either NVIDIA GPUs or no accelerators"
        )
    kind = match["kind"]
    return Capacity(
        name=match["name"], instance_type=match["type"], spot=kind == "spot", paid=kind == "paid"
    )


class EcsCapacity:
    """Lists the offers of the ECS cluster's capacity providers. The field `zone` of an offer
    contains the name of the offer's capacity provider.
    """

    def __init__(self, aws: AwsService, context: ProviderContext) -> None:
        self._aws, self._settings = aws, context.settings
        self._find_instance = context.find_instance
        self._prices = Ec2Prices(context)
        self.left_out: Mapping[str, str] = {}  # the reason by capacity provider

    @property
    def cluster(self) -> str:
        """The name of the cluster in the settings."""
        return str(self._settings["cluster"])

    async def offers(self) -> Sequence[Offer]:
        """Return the offers of all entries of the setting `capacity`. Raises CloudFault,
        Refused."""
        region, entries = await self._aws.only_region("cluster"), parse_capacity(self._settings)
        known = await self._list_names(region)
        await self._prices.refresh()
        offers: list[Offer] = []
        left_out = {}
        for each in entries:
            found: Sequence[Offer] | str = (
                await asyncio.to_thread(self._make_offers, region, each)
                if each.name in known
                else f"the cluster {self.cluster} has no such capacity provider"
            )
            if isinstance(found, str):
                left_out[each.name] = found
            else:
                offers += found
        self.left_out = left_out
        return offers

    async def _list_names(self, region: str) -> Sequence[str]:
        """Return the capacity providers of the cluster. Raises CloudFault, Refused."""
        told = await self._aws.call(region, "describe_clusters", clusters=[self.cluster])
        for each in told.get("clusters", ()):
            if each["status"] == "ACTIVE":
                return [str(name) for name in each.get("capacityProviders", ())]
        raise Refused(
            f"[providers.ecs] cluster: {region} has no active cluster {self.cluster}; name one "
            "that exists, or create it"
        )

    def _make_offers(self, region: str, capacity: Capacity) -> Sequence[Offer] | str:
        """Return the offers of one entry, or the reason why the entry has no offers. The function
        reads files."""
        if not capacity.instance_type:
            public = bool(self._settings["public_address"])
            return list_fargate(region, capacity.name, public_address=public)
        purchase = Purchase.SPOT if capacity.spot else Purchase.ON_DEMAND
        if capacity.paid:
            found = self._find_instance("aws", capacity.instance_type)
            if found is None:
                return f"the catalog does not contain {capacity.instance_type}"
            machine = replace(found, rate=HourlyRate(0), term_months=0, source=_PAID, as_of=None)
        else:
            priced = self._prices.find(region, capacity.instance_type, purchase)
            if isinstance(priced, str):
                return priced
            machine = priced
        return [
            replace(
                machine,
                provider="ecs",
                region=region,
                zone=capacity.name,
                instance_type=capacity.instance_type,
                purchase=purchase,
                owned=capacity.paid,  # so its price is not compared with the prices of others
                capacity=None,
                extras=(),
            )
        ]


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

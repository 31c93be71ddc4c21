"""Reads the setting `capacity`, which lists the ECS capacity that Cavvy offers and states what it
costs.

An entry is `FARGATE`, `FARGATE_SPOT`, or the name of a capacity provider with an Auto Scaling group
of one instance type: `NAME=INSTANCE_TYPE`, `NAME=INSTANCE_TYPE/spot` or `NAME=INSTANCE_TYPE/paid`.
"""

import asyncio
import re
from collections.abc import Mapping, Sequence

from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.tasks import Scalar
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import Struct, replace
from cavvy.providers.base import ProviderContext, Refused
from cavvy.providers.ecs.fargate import PURCHASES, list_fargate
from cavvy.providers.formats.machines import is_ec2_container_type
from cavvy.providers.managed.aws import AwsService, Ec2Prices
from cavvy.providers.vm.keys import list_setting

_ENTRY = re.compile(r"(?P<name>[\w-]{1,255})=(?P<type>[a-z0-9-]+\.[a-z0-9-]+)(/(?P<kind>\w+))?")
_KINDS = (None, "spot", "paid")
_PAID = "the setting `capacity`: the instances are already paid for"


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

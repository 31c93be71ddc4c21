"""What a stand-in's own records say that its machines cost."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from tests.sim.drill_clouds import DrillCloud

from cavvy.domain.events import ChargeKind
from cavvy.domain.gangs import NodeExtra, list_extras
from cavvy.domain.offers import Offer
from cavvy.providers.contract.memory_cloud import Rented
from cavvy.providers.vm.cloud import BillEnd, BillStart
from cavvy.providers.vm.records import GANG

_MONTH_H = 744  # hours of January, when drills happen
# APIs that report times more exactly than in whole seconds
_EXACT = frozenset({"azure", "gcp", "ibm", "jarvislabs", "lambda", "oci", "tpu", "vast"})


@dataclass(frozen=True, kw_only=True)
class Life:
    """A machine's life by its cloud's records: it is billed from `begins` to `ends`, or not at all
    if it ended before it ran and its cloud does not bill the boot.
    """

    begins: datetime
    ends: datetime
    billed: bool

    def cost(self, offer: Offer) -> int:
        """What the cloud bills for the machine, its disk and its address, in micro-US-dollars."""
        if not self.billed:
            return 0
        lived = self.ends - self.begins
        machine = offer.rate.over(max(lived, offer.minimum_charge)).micros
        return machine + sum(_price(offer, extra, lived) for extra in list_extras(offer))


def _price(offer: Offer, extra: NodeExtra, lived: timedelta) -> int:
    prices = [
        each
        for each in offer.extras
        if (each.kind, each.name) == (extra.kind, extra.name)
        and (not each.up_to_gib or each.up_to_gib >= extra.units)
    ]
    price = min(prices, key=lambda each: each.up_to_gib)
    micros = price.price.micros * (1 if price.up_to_gib else extra.units)
    hours = _MONTH_H if extra.kind is ChargeKind.DISK else 1
    return round(micros / hours * (max(lived, price.minimum) / timedelta(hours=1)))


def read_life(cloud: DrillCloud, machine: Rented) -> Life:
    """A machine that has ended."""
    assert machine.ended is not None
    free = cloud.traits.bill_starts is BillStart.RUNNING
    begins = machine.at + (cloud.boot_time if free else timedelta(0))
    ends = machine.ended
    if cloud.traits.bill_ends is BillEnd.SHUTDOWN:
        ends = min(ends, cloud.off_at.get(machine.id, ends))
    return Life(begins=min(begins, ends), ends=ends, billed=begins < ends or not free)


def rounding_of(offer: Offer, machines: int) -> int:
    """By how much a bill may differ because its cloud reports times in whole seconds."""
    if offer.provider in _EXACT:
        return 0
    return machines * offer.rate.over(timedelta(seconds=1)).micros


def read_name(machine: Rented) -> tuple[str, int]:
    """The gang and the rank of a machine, from its name and its tags."""
    head, _, rank, _ = machine.name.rsplit("-", 3)
    return machine.tags.get(GANG) or head.split("-", 2)[2], int(rank)


def names_gang(written: str, gang: str) -> bool:
    """Whether the gang in a machine's name is this one: names that must be short have a hash."""
    digest = hashlib.sha256(gang.encode()).hexdigest()
    return written == gang or (len(written) in range(12, 21) and digest.startswith(written))


def count_overlaps(machines: Sequence[Rented]) -> int:
    """How many of these machines were started while an earlier one lived."""
    ordered = sorted(machines, key=lambda each: each.at)
    return sum(
        any(other.ended is None or other.ended > each.at for other in ordered[:number])
        for number, each in enumerate(ordered)
    )

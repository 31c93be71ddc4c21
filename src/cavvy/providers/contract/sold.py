"""What the cloud behind a stand-in sells, as the cloud's own pages state it, and the comparison
with the offers of the provider under test.

A table has one line for each type of machine:

    # type   places       accelerators  CPUs  memory  disk    price  spot
    small    north,south  -             4     16GiB   80GiB   0.03   -
    eight    north/n-1    8xH100/80GiB  192   2TiB    -       9.20   4.10

A place is a region, or a region and a zone. The memory after "/" is the memory of one accelerator;
"1/6xA10/4GiB" is a part of one accelerator. "-" stands for none, for a disk whose size the cloud
does not state, and for a purchase option that is not sold. A price is for the whole machine and
hour, in USD or in the currency that follows it, such as "0.84EUR".
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

from cavvy.catalog.tables import find_rate
from cavvy.domain.offers import ExtraPrice, Offer, Purchase
from cavvy.domain.units import HourlyRate, parse_memory_mib, parse_rate
from cavvy.domain.values import Struct

_COLUMNS = ["type", "places", "accelerators", "CPUs", "memory", "disk", "price", "spot"]
_ACCELERATORS = re.compile(r"(?P<count>\d+(?:/\d+)?)x(?P<name>[^/\s]+)/(?P<memory>\w[\w.]*)")
_PRICE = re.compile(r"(?P<amount>\d+(?:\.\d+)?)(?P<currency>[A-Z]{3})?")
_TOLERANCE = Decimal("0.001")  # of prices, which the provider and the table may round differently
# The factors of usual mistakes. Factors of other mistakes, such as 8 for the number of GPUs, differ
# from machine to machine.
_FACTORS = {
    Decimal(730): "hours of a month",
    Decimal(720): "hours of a month",
    Decimal(744): "hours of a month",
    Decimal(672): "hours of four weeks",
    Decimal(8760): "hours of a year",
    Decimal(3600): "seconds of an hour",
    Decimal(60): "minutes of an hour",
    Decimal(100): "cents of a dollar",
    Decimal(1_000_000): "micro-dollars of a dollar",
    Decimal(1024): "MiB of a GiB",
    Decimal("1.048576"): "MiB of a million bytes",
    Decimal("1.073741824"): "GiB of a billion bytes",
}


class SoldMachine(Struct, frozen=True, kw_only=True):
    """One machine that the cloud sells in one place under one purchase option."""

    instance_type: str
    region: str
    zone: str | None
    accelerator: str | None = None
    accelerator_count: int = 0
    accelerator_memory_mib: int = 0
    accelerator_part: float = 1.0
    vcpus: float
    memory_mib: int
    disk_gib: int | None
    purchase: Purchase
    rate: HourlyRate
    price: str  # as in the table

    @property
    def what(self) -> tuple[str, str, str | None, Purchase]:
        return self.instance_type, self.region, self.zone, self.purchase


def read_table(text: str) -> Sequence[SoldMachine]:
    """Parse a table. Raises ValueError, which names the line."""
    lines = [line.partition("#")[0].split() for line in text.splitlines()]
    return [each for line in lines if line for each in _read_line(line)]


def _read_line(line: Sequence[str]) -> Iterable[SoldMachine]:
    if len(line) != len(_COLUMNS):
        columns = ", ".join(_COLUMNS)
        raise ValueError(f"expected the columns {columns}, not {' '.join(line)!r}")
    name, places, accelerators, cpus, memory, disk, *prices = line
    sold = dict(zip((Purchase.ON_DEMAND, Purchase.SPOT), prices, strict=True))
    for place in places.split(","):
        region, _, zone = place.partition("/")
        for purchase, price in sold.items():
            if price != "-":
                yield SoldMachine(
                    instance_type=name,
                    region=region,
                    zone=zone or None,
                    vcpus=float(cpus),
                    memory_mib=parse_memory_mib(memory),
                    disk_gib=None if disk == "-" else parse_memory_mib(disk) // 1024,
                    purchase=purchase,
                    rate=_read_price(price),
                    price=price,
                    **_read_accelerators(accelerators),
                )


def _read_accelerators(text: str) -> Mapping[str, Any]:
    if text == "-":
        return {}
    if not (found := _ACCELERATORS.fullmatch(text)):
        raise ValueError(f"expected accelerators such as 8xH100/80GiB, not {text!r}")
    count = float(Fraction(found["count"]))
    return {
        "accelerator": found["name"],
        "accelerator_count": max(1, int(count)),
        "accelerator_part": min(count, 1.0),
        "accelerator_memory_mib": parse_memory_mib(found["memory"]),
    }


def _read_price(text: str) -> HourlyRate:
    if not (found := _PRICE.fullmatch(text)):
        raise ValueError(f"expected a price such as 0.84 or 0.84EUR, not {text!r}")
    return parse_rate(Decimal(found["amount"]) * find_rate(found["currency"] or "USD").usd)


def compare(sold: Sequence[SoldMachine], offers: Sequence[Offer]) -> Sequence[str]:
    """Return the differences between what the cloud sells and what the provider offers, as
    sentences."""
    wanted = {each.what: each for each in sold}
    found = {(o.instance_type, o.region, o.zone, o.purchase): o for o in offers}
    return sorted(
        [
            *(f"{_name(each)} is sold, but not offered" for each in wanted.keys() - found.keys()),
            *(f"{_name(each)} is offered, but not sold" for each in found.keys() - wanted.keys()),
            *(
                f"{_name(what)}: {each}"
                for what in wanted.keys() & found.keys()
                for each in _compare_one(wanted[what], found[what])
            ),
        ]
    )


def describe_extra(extra: ExtraPrice) -> str:
    """Return the price of a disk or an address in the form of `RestStandIn.extras`."""
    size = f"<={extra.up_to_gib}" if extra.up_to_gib else ""
    words = (str(extra.kind), f"{extra.name}{size}", f"{extra.price.usd:f}")
    return " ".join(each for each in words if each)


def _name(what: tuple[str, str, str | None, Purchase]) -> str:
    kind, region, zone, purchase = what
    return f"{kind} in {region}/{zone}, {purchase}" if zone else f"{kind} in {region}, {purchase}"


def _compare_one(sold: SoldMachine, offer: Offer) -> Iterable[str]:
    if offer.accelerator != sold.accelerator:
        yield f"the accelerator is {sold.accelerator}, but the offer has {offer.accelerator}"
    numbers = [
        ("GPUs", sold.accelerator_count, offer.accelerator_count),
        ("parts of a GPU", sold.accelerator_part, offer.accelerator_part),
        ("MiB of memory of a GPU", sold.accelerator_memory_mib, offer.accelerator_memory_mib),
        ("CPUs", sold.vcpus, offer.vcpus),
        ("MiB of memory", sold.memory_mib, offer.memory_mib),
    ]
    if sold.disk_gib is not None:
        numbers.append(("GiB of disk", sold.disk_gib, offer.disk_gib or 0))
    for unit, right, told in numbers:
        if abs(right - told) > 1e-6:
            guess = _guess(Decimal(str(told)), Decimal(str(right)))
            yield f"the number of {unit} is {right:.10g}, not {told:.10g}{guess}"
    price, offered = sold.rate.usd, offer.rate.usd
    if abs(price - offered) > max(price * _TOLERANCE, Decimal("0.000002")):
        words = f" ({sold.price})" if sold.price[-1].isalpha() else ""
        guess = _guess(offered, price)
        yield f"the price is ${price:f} an hour{words}, not ${offered:f}{guess}"


def _guess(told: Decimal, right: Decimal) -> str:
    """Return what the factor between the numbers suggests, or ""."""
    if not told or not right:
        return ""
    factor = told / right
    for known, words in _FACTORS.items():
        for each, sense in ((known, "times"), (1 / known, "divided by")):
            if abs(factor / each - 1) < _TOLERANCE:
                return f": the right number, {sense} the {words}?"
    return f": {factor:.3g} times the right number"

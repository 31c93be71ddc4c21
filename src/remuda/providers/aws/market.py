"""What EC2 offers now. Types and on-demand prices are asked for once a day, spot prices every few minutes."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

from remuda.domain.offers import Offer, Purchase
from remuda.domain.tasks import Scalar
from remuda.domain.units import HourlyRate, parse_rate
from remuda.providers.aws.account import Account, Json
from remuda.providers.aws.prices import fetch_on_demand, fetch_spot
from remuda.providers.aws.shapes import Shape, is_offered, read_shape, split_patterns
from remuda.providers.base import ProviderError
from remuda.providers.hosts.records import read, write

_FACTS_AGE = timedelta(days=1)
_SPOT_AGE = timedelta(minutes=5)
_RESERVED_AGE = timedelta(minutes=1)
MINUTE = timedelta(minutes=1)  # EC2 bills at the least this of an instance with Linux


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """A region's types and on-demand prices (micro-dollars per hour), as they are kept on disk."""

    as_of: datetime
    asked: str  # the setting they were read for
    shapes: Mapping[str, Shape]
    rates: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """A capacity reservation or block of the account's that the settings let us use."""

    id: str
    region: str
    zone: str
    type: str
    free: int
    block: bool
    open: bool  # takes any matching instance without being named


@dataclass(slots=True, kw_only=True)
class _Region:
    facts: Facts | None = None
    spot: Mapping[tuple[str, str], HourlyRate] = field(default_factory=dict)
    spot_at: datetime | None = None
    reserved: Sequence[Reservation] = ()
    reserved_at: datetime | None = None


class Market:
    """Reads and remembers offers; a question that is asked while the first is still read joins it."""

    def __init__(
        self, account: Account, settings: Mapping[str, Scalar], home: Path, now: Callable[[], datetime]
    ) -> None:
        self._account, self._settings, self._home, self._now = account, settings, home, now
        self._regions: dict[str, _Region] = {}
        self._reading: dict[str, asyncio.Task[None]] = {}

    async def offers(self) -> Sequence[Offer]:
        """Every offer of every region that answers. Raises TryAgain, Refused where none does."""
        regions = await self._account.regions()
        results = await asyncio.gather(*(self._fresh(name) for name in regions), return_exceptions=True)
        problems = [each for each in results if isinstance(each, BaseException)]
        for problem in problems:
            if not isinstance(problem, ProviderError):
                raise problem
        offers = [offer for name in regions for offer in self._list(name)]
        if not offers and problems:
            raise problems[0]
        return offers

    async def shape(self, region: str, name: str) -> Shape | None:
        """One type; None where the region has none of that name."""
        await self._fresh(region)
        facts = self._regions[region].facts
        return facts.shapes.get(name) if facts else None

    async def reservation(self, offer: Offer, nodes: int) -> Reservation | None:
        """The reservation that an offer in a zone stands for; None for one without. Asks anew."""
        if not self._reservations() or offer.purchase is not Purchase.ON_DEMAND or offer.zone is None:
            return None
        found = await self._fetch_reserved(offer.region)
        fits = [each for each in found if each.type == offer.instance_type and each.zone == offer.zone]
        fits = sorted((each for each in fits if each.free >= nodes), key=lambda each: (each.free, each.id))
        return fits[0] if fits else None

    async def close(self) -> None:
        for task in self._reading.values():
            task.cancel()
        if self._reading:
            await asyncio.wait(self._reading.values())
        self._reading.clear()

    async def _fresh(self, region: str) -> None:
        """Read what is too old; a caller that gives up leaves the reading to the next."""
        task = self._reading.get(region)
        if task is None or task.done():
            task = self._reading[region] = asyncio.create_task(self._read(region))
        await asyncio.shield(task)

    async def _read(self, region: str) -> None:
        known, now = self._regions.setdefault(region, _Region()), self._now()
        asked = str(self._settings.get("instances", ""))
        if known.facts is None:
            kept = read(self._file(region), Facts)
            known.facts = kept if kept is not None and kept.asked == asked else None
        if known.facts is None or now - known.facts.as_of >= _FACTS_AGE:
            known.facts = await self._fetch_facts(region, asked)
            write(self._file(region), known.facts)
        work: list[Awaitable[None]] = []
        if known.spot_at is None or now - known.spot_at >= _SPOT_AGE:
            work.append(self._read_spot(region, known))
        if self._reservations() and (known.reserved_at is None or now - known.reserved_at >= _RESERVED_AGE):
            work.append(self._read_reserved(region, known))
        for each in work:
            await each

    async def _fetch_facts(self, region: str, asked: str) -> Facts:
        patterns = split_patterns(asked)
        arguments = {"Filters": [{"Name": "instance-type", "Values": list(patterns)}]} if patterns else {}
        told = await self._account.pages(region, "ec2", "describe_instance_types", "InstanceTypes", **arguments)
        found = [shape for each in told if (shape := read_shape(each)) is not None]
        shapes = {shape.type: shape for shape in found if is_offered(shape, patterns)}
        rates = await fetch_on_demand(self._account, region, sorted(shapes)) if shapes else {}
        micros = {name: rate.micros_per_hour for name, rate in rates.items() if name in shapes}
        return Facts(as_of=self._now(), asked=asked, shapes=shapes, rates=micros)

    async def _read_spot(self, region: str, known: _Region) -> None:
        types = sorted(name for name, shape in known.facts.shapes.items() if shape.spot) if known.facts else []
        now = self._now()
        told = await fetch_spot(self._account, region, types, now)
        known.spot = {(name, zone): rate for name, zone, _, rate in told}
        known.spot_at = now

    async def _read_reserved(self, region: str, known: _Region) -> None:
        known.reserved, known.reserved_at = await self._fetch_reserved(region), self._now()

    async def _fetch_reserved(self, region: str) -> Sequence[Reservation]:
        told = await self._account.pages(
            region, "ec2", "describe_capacity_reservations", "CapacityReservations",
            Filters=[{"Name": "state", "Values": ["active"]}],
        )  # fmt: skip
        wanted = set(self._reservations())
        return [_read_reservation(each, region) for each in told if each["CapacityReservationId"] in wanted]

    def _reservations(self) -> Sequence[str]:
        return split_patterns(str(self._settings.get("reservations", "")))

    def _file(self, region: str) -> Path:
        return self._home / f"facts-{region}.json"

    def _list(self, region: str) -> list[Offer]:
        known = self._regions.get(region)
        if known is None or known.facts is None:
            return []
        day = known.facts.as_of.date()
        offers = [
            _make(known.facts.shapes[name], region, HourlyRate(micros), day=day, source="AWS Price List API")
            for name, micros in sorted(known.facts.rates.items())
            if known.facts.shapes[name].on_demand
        ]
        for (name, zone), rate in sorted(known.spot.items()):
            offers.append(
                _make(known.facts.shapes[name], region, rate, zone=zone, purchase=Purchase.SPOT,
                      day=(known.spot_at or known.facts.as_of).date(), source="EC2 spot price history")
            )  # fmt: skip
        return [*offers, *self._list_reserved(known, region)]

    def _list_reserved(self, known: _Region, region: str) -> list[Offer]:
        offers: dict[str, Offer] = {}
        facts = known.facts
        for each in known.reserved:
            if facts is None or each.type not in facts.shapes:
                continue
            rate = self._reserved_rate(each, facts)
            offer = _make(facts.shapes[each.type], region, rate, zone=each.zone, capacity=each.free,
                          source=f"capacity {'block' if each.block else 'reservation'} {each.id}")  # fmt: skip
            best = offers.get(offer.key)
            if best is None or (best.capacity or 0) < each.free:
                offers[offer.key] = offer
        return list(offers.values())

    def _reserved_rate(self, reservation: Reservation, facts: Facts) -> HourlyRate:
        given = self._settings.get("reserved_price_usd_hr")
        if given is not None:
            return parse_rate(str(given))
        return HourlyRate(0 if reservation.block else facts.rates.get(reservation.type, 0))


def _make(
    shape: Shape, region: str, rate: HourlyRate, *, zone: str | None = None, purchase: Purchase = Purchase.ON_DEMAND,
    capacity: int | None = None, day: object = None, source: str = "",
) -> Offer:  # fmt: skip
    from datetime import date

    return Offer(
        provider="aws",
        region=region,
        zone=zone,
        instance_type=shape.type,
        accelerator=shape.accelerator,
        accelerator_count=shape.accelerator_count,
        accelerator_memory_mib=shape.accelerator_memory_mib,
        vcpus=shape.vcpus,
        memory_mib=shape.memory_mib,
        network_mbps=shape.network_mbps,
        purchase=purchase,
        rate=rate,
        minimum_charge=MINUTE,
        capacity=capacity,
        source=source,
        as_of=day if isinstance(day, date) else None,
    )


def _read_reservation(told: Json, region: str) -> Reservation:
    return Reservation(
        id=str(told["CapacityReservationId"]),
        region=region,
        zone=str(told["AvailabilityZone"]),
        type=str(told["InstanceType"]),
        free=int(told.get("AvailableInstanceCount", 0)),
        block=told.get("ReservationType") == "capacity-block",
        open=told.get("InstanceMatchCriteria") == "open",
    )

"""Reads EC2's current offers. Instance types and on-demand prices are read once a day, and spot
prices are read every few minutes.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from cavvy.domain.events import ChargeKind
from cavvy.domain.offers import ExtraPrice, Offer, Purchase, Quota
from cavvy.domain.tasks import Scalar
from cavvy.domain.units import HourlyRate, parse_rate
from cavvy.domain.values import Struct, field, replace
from cavvy.providers.aws.account import HOME, NOT_ENABLED, AwsAccount, AwsFault, Json
from cavvy.providers.aws.prices import MINUTE, fetch_extras, fetch_on_demand, fetch_spot
from cavvy.providers.aws.quotas import Quotas, fetch_instances, fetch_quotas, limit, read_quotas
from cavvy.providers.aws.shapes import (
    InstanceShape,
    find_default,
    is_sold,
    list_unknown,
    read_shape,
    split_patterns,
)
from cavvy.providers.base import ProviderError, Refused, TryAgain
from cavvy.providers.hosts.records import read, write
from cavvy.providers.required_images import require_images

_FACTS_AGE = timedelta(days=1)
_SPOT_AGE = timedelta(minutes=5)
_QUOTAS_AGE = timedelta(minutes=10)
_USE_AGE = timedelta(minutes=1)  # how long the list of instances that use the quotas is cached
_QUOTAS_AGAIN = timedelta(minutes=1)  # the pause after a failed attempt to read the quotas
_RESERVED_AGE = timedelta(minutes=1)
# EC2 starts to terminate the instances in a capacity block 30 minutes before the block ends. EC2
# announces the termination 10 minutes earlier, on EventBridge only:
# https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/capacity-blocks-monitor.html
_BLOCK_CLEARED = timedelta(minutes=30)
_ULTRA = ("p6e-", "trn2u.")  # instance types of UltraServers
_LAST_START = timedelta(
    minutes=20
)  # a launch needs at least this much time before the block ends; less would not be useful
_PATIENCE_S = 15.0  # seconds to wait for one region; less than the control plane waits for `offers`


class RegionFacts(Struct, frozen=True, kw_only=True):
    """A region's instance types and on-demand prices, cached on disk (micro-dollars per hour)."""

    as_of: datetime
    asked: str  # the value of the setting `instances` when the facts were read
    shapes: Mapping[str, InstanceShape]
    # zones keyed by instance type, since EC2 offers most new types only in some zones
    zones: Mapping[str, Sequence[str]]
    rates: Mapping[str, int]
    # names of accelerators that the catalog does not know, so that their types are not offered
    unknown: Sequence[str] = ()
    extras: Sequence[ExtraPrice] = ()  # prices of disks and addresses


class CapacityReservation(Struct, frozen=True, kw_only=True):
    """A capacity reservation or capacity block that is listed in the settings."""

    id: str
    region: str
    zone: str
    type: str
    free: int
    block: bool
    problem: str = ""  # why no instance can start in the reservation; "" if one can
    closes_at: datetime | None = None  # no instance can be started after this time
    ends_at: datetime | None = None  # for a block: when EC2 starts to terminate its instances


class _Region(Struct, kw_only=True):
    facts: RegionFacts | None = None
    spot: Mapping[tuple[str, str], HourlyRate] = field(default_factory=dict)
    spot_at: datetime | None = None
    limits: Sequence[Json] = ()  # the quotas as returned by AWS
    quotas: Quotas = field(default_factory=dict)
    quotas_at: datetime | None = None
    quotas_after: datetime | None = None  # the time when the quotas or their use are read again
    quotas_problem: str = ""  # why the last attempt to read the quotas or their use failed
    reserved: Sequence[CapacityReservation] = ()
    reserved_at: datetime | None = None


class AwsMarket:
    """Reads and caches offers. Concurrent callers share the requests to AWS."""

    def __init__(
        self,
        account: AwsAccount,
        settings: Mapping[str, Scalar],
        home: Path,
        now: Callable[[], datetime],
    ) -> None:
        self._account, self._settings, self._home, self._now = account, settings, home, now
        self._regions: dict[str, _Region] = {}
        self._reading: dict[str, asyncio.Task[None]] = {}
        self.regions: Sequence[str] = ()  # regions that the last `offers` queried
        self._faults: Mapping[str, str] = {}  # why regions did not answer the last `offers`
        self.silent: Sequence[
            str
            # (region, reason) of each region that did not answer the last `offers` or has old
            # quotas
        ] = ()

    async def offers(self) -> Sequence[Offer]:
        """Return the offers of all regions that answer. Raises TryAgain or Refused if no region
        answers.
        """
        regions = self.regions = await self._account.regions()
        results = await asyncio.gather(
            *(self._hear(name) for name in regions), return_exceptions=True
        )
        problems = [each for each in results if isinstance(each, BaseException)]
        for problem in problems:
            if not isinstance(problem, ProviderError):
                raise problem
        offers = [offer for name in regions for offer in self._list(name)]
        if not offers and problems:
            raise problems[0]
        told = zip(regions, results, strict=True)
        self._faults = {name: str(each) for name, each in told if isinstance(each, BaseException)}
        silent = [f"{name}: {problem}" for name, problem in self._faults.items()]
        self.silent = [*silent, *(text for name in regions if (text := self._stale_quotas(name)))]
        return offers

    def quotas(self, region: str) -> tuple[Sequence[Quota], str]:
        """Return the account's vCPU quotas that the last call of `offers` read, sorted by name. The
        result also states why the last attempt to read quotas failed, or "" if the attempt
        succeeded.
        """
        known = self._regions.get(region, _Region())
        by_name = {each.name: each for each in known.quotas.values()}
        # a region that does not answer is not asked for its quotas
        fresh = known.quotas_after is not None and self._now() <= known.quotas_after
        unread = "" if fresh else self._faults.get(region, "")
        return [by_name[name] for name in sorted(by_name)], known.quotas_problem or unread

    def untold_quotas(self, region: str) -> str:
        """Return the region's name with the reason why the region's quotas are unknown or out of
        date, or "" if the quotas are up to date.
        """
        _, problem = self.quotas(region)
        return self._stale_quotas(region) or (f"{region}: {problem}" if problem else "")

    def forget_use(self, region: str) -> None:
        """Discard the cached usage of the region's quotas, because instances were started or
        terminated.
        """
        if region in self._regions and not self._regions[region].quotas_problem:
            self._regions[region].quotas_after = None

    async def shape(self, region: str, name: str) -> InstanceShape | None:
        """Return an instance type, or None if EC2 does not offer it in the region."""
        try:
            await self._fresh(region)
        except ProviderError:  # the types may be known although the prices could not be read
            if self._regions[region].facts is None:
                raise
        facts = self._regions[region].facts
        return facts.shapes.get(name) if facts else None

    def zones(self, region: str, name: str) -> Collection[str]:
        """Return the region's zones in which EC2 offers the type. The caller must first call
        `shape` for the type.
        """
        facts = self._regions[region].facts
        return facts.zones.get(name, ()) if facts else ()

    async def reservation(self, offer: Offer, nodes: int) -> CapacityReservation | None:
        """Return a reservation with at least `nodes` free instances for an on-demand offer in one
        zone, or None if no such reservation exists. This method fetches the current reservations
        from EC2.
        """
        if (
            not self._reservations()
            or offer.purchase is not Purchase.ON_DEMAND
            or offer.zone is None
        ):
            return None
        found = await self._fetch_reserved(offer.region)
        now = self._now()
        fits = [
            each
            for each in found
            if (each.type, each.zone) == (offer.instance_type, offer.zone) and _opens(each, now)
        ]
        fits = sorted(
            (each for each in fits if each.free >= nodes), key=lambda each: (each.free, each.id)
        )
        return fits[0] if fits else None

    async def close(self) -> None:
        for task in self._reading.values():
            task.cancel()
        if self._reading:
            await asyncio.wait(self._reading.values())
        self._reading.clear()

    async def _hear(self, region: str) -> None:
        """Call `_fresh`, and raise TryAgain after a time limit, so that one slow region does not
        delay the other regions. After the time limit, the requests to the region continue, and the
        next call waits for their results.
        """
        try:
            async with asyncio.timeout(_PATIENCE_S):
                await self._fresh(region)
        except TimeoutError:
            raise TryAgain(f"no answer from {region} within {_PATIENCE_S:.0f} s") from None

    async def _fresh(self, region: str) -> None:
        """Refresh the region's outdated cached data. If the caller is cancelled, the requests
        continue, and the next caller gets the results.
        """
        task = self._reading.get(region)
        if task is None or task.done():
            task = self._reading[region] = asyncio.create_task(self._read(region))
        await asyncio.shield(task)

    async def _read(self, region: str) -> None:
        known, now = self._regions.setdefault(region, _Region()), self._now()
        asked = str(self._settings.get("instances", ""))
        if known.facts is None:
            kept = read(self._file(region), RegionFacts)
            known.facts = kept if kept is not None and kept.asked == asked else None
        if known.facts is None or now - known.facts.as_of >= _FACTS_AGE:
            try:
                known.facts = await self._fetch_facts(region, asked)
            except Refused as error:
                raise await self._explain(region, error) from error
            write(self._file(region), known.facts)
        work: list[Callable[[str, _Region], Awaitable[None]]] = []
        if known.quotas_after is None or now >= known.quotas_after:
            work.append(self._read_quotas)
        if known.spot_at is None or now - known.spot_at >= _SPOT_AGE:
            work.append(self._read_spot)
        if self._reservations() and (
            known.reserved_at is None or now - known.reserved_at >= _RESERVED_AGE
        ):
            work.append(self._read_reserved)
        problems: list[ProviderError] = []
        for each in work:  # if one read fails, the others still run
            try:
                await each(region, known)
            except ProviderError as error:
                problems.append(error)
        if problems:
            raise problems[0]

    async def _fetch_facts(self, region: str, asked: str) -> RegionFacts:
        patterns = split_patterns(asked)
        named = {"Name": "instance-type", "Values": list(patterns)}
        arguments: dict[str, Any] = {"Filters": [named]} if patterns else {}
        told = await self._account.items(region, "describe_instance_types", **arguments)
        found = [shape for each in told if (shape := read_shape(each)) is not None]
        shapes = {shape.type: shape for shape in found if is_sold(shape, patterns)}
        rates = await fetch_on_demand(self._account, region, sorted(shapes)) if shapes else {}
        micros = {name: rate.micros_per_hour for name, rate in rates.items() if name in shapes}
        zones: dict[str, list[str]] = {}
        for each in await self._account.items(
            region,
            "describe_instance_type_offerings",
            LocationType="availability-zone",
            **arguments,
        ):
            if each["InstanceType"] in shapes:
                zones.setdefault(str(each["InstanceType"]), []).append(str(each["Location"]))
        unknown = sorted({name for each in told for name in list_unknown(each)})
        return RegionFacts(
            as_of=self._now(),
            asked=asked,
            shapes=shapes,
            zones=zones,
            rates=micros,
            unknown=unknown,
            extras=await fetch_extras(self._account, region),
        )

    async def _explain(self, region: str, error: Refused) -> Refused:
        """Return the error to raise after a region's first call failed. A region that the account
        has not enabled rejects even valid credentials. The method asks the API of another region
        whether the account has enabled `region`.
        """
        fault = error.__cause__
        if not isinstance(fault, AwsFault) or fault.code not in NOT_ENABLED:
            return error
        try:
            told = await self._account.items(
                HOME, "describe_regions", AllRegions=True, RegionNames=[region]
            )
        except ProviderError:
            return error
        if not any(each.get("OptInStatus") == "not-opted-in" for each in told):
            return error
        return Refused(
            f"the account has not enabled the region {region}; enable it with `aws account "
            f"enable-region --region-name {region}`, which takes some minutes, or remove it from "
            "`regions` in [providers.aws]"
        )

    async def _read_spot(self, region: str, known: _Region) -> None:
        types = (
            sorted(name for name, shape in known.facts.shapes.items() if shape.spot)
            if known.facts
            else []
        )
        now = self._now()
        told = await fetch_spot(self._account, region, types, now)
        known.spot = {(name, zone): rate for name, zone, _, rate in told}
        known.spot_at = now

    async def _read_quotas(self, region: str, known: _Region) -> None:
        """Read the quotas and their usage. If a request fails, keep the last known values. A quota
        that has never been read does not limit offers.
        """
        now = self._now()
        try:
            if known.quotas_at is None or now - known.quotas_at >= _QUOTAS_AGE:
                known.limits = await fetch_quotas(self._account, region)
                known.quotas_at = now
                known.quotas = read_quotas(known.limits, region, None)
            instances = await fetch_instances(self._account, region)
        except ProviderError as error:
            known.quotas_problem, known.quotas_after = str(error), now + _QUOTAS_AGAIN
        else:
            known.quotas = read_quotas(known.limits, region, instances)
            known.quotas_problem, known.quotas_after = "", now + _USE_AGE

    async def _read_reserved(self, region: str, known: _Region) -> None:
        known.reserved, known.reserved_at = await self._fetch_reserved(region), self._now()

    async def _fetch_reserved(self, region: str) -> Sequence[CapacityReservation]:
        told = await self._account.items(region, "describe_capacity_reservations")
        wanted = set(self._reservations())
        mine = [each for each in told if each["CapacityReservationId"] in wanted]
        zones = await self._account.items(region, "describe_availability_zones") if mine else ()
        names = {str(each["ZoneId"]): str(each["ZoneName"]) for each in zones}
        return [_read_reservation(each, region, names) for each in mine]

    def reserved(self, region: str) -> Mapping[str, str]:
        """Describe the reservations that the settings list for the region. Their state is the one
        that the last call of `offers` has read. The keys of the result are reservation ids.
        """
        known = self._regions.get(region)
        return {each.id: _describe(each, self._now()) for each in (known.reserved if known else ())}

    def disk_price(self, region: str, kind: str) -> ExtraPrice | None:
        """Return the price that the last call of `offers` read for this disk type, or None if that
        price is unknown.
        """
        known = self._regions.get(region)
        prices = self._extras(known.facts) if known and known.facts else ()
        found = (each for each in prices if (each.kind, each.name) == (ChargeKind.DISK, kind))
        return next(found, None)

    def unknown(self, region: str) -> Sequence[str]:
        """Return the accelerators that EC2 offers in the region but the catalog does not contain.
        The method uses the data that the last call of `offers` read.
        """
        known = self._regions.get(region)
        return known.facts.unknown if known and known.facts else ()

    def _stale_quotas(self, region: str) -> str:
        """Return a warning that states the age of outdated quotas, or "" if the quotas are up to
        date or were never read.
        """
        known = self._regions.get(region)
        if known is None or known.quotas_at is None or not known.quotas_problem:
            return ""
        minutes = round((self._now() - known.quotas_at) / MINUTE)
        return (
            f"{region}: the quotas are {minutes} minutes old and cannot be read again: "
            f"{known.quotas_problem}"
        )

    def _reservations(self) -> Sequence[str]:
        return split_patterns(str(self._settings.get("reservations", "")))

    def _file(self, region: str) -> Path:
        return self._home / f"facts-{region}.json"

    def _list(self, region: str) -> list[Offer]:
        known = self._regions.get(region)
        if known is None or known.facts is None:
            return []
        day, extras = known.facts.as_of.date(), self._extras(known.facts)
        offers = [
            replace(
                _make(known.facts.shapes[name], region, HourlyRate(micros)),
                as_of=day,
                source="AWS Price List API",
                extras=extras,
            )
            for name, micros in sorted(known.facts.rates.items())
            if known.facts.shapes[name].on_demand
        ]
        offers += [
            replace(
                _make(known.facts.shapes[name], region, rate),
                zone=zone,
                purchase=Purchase.SPOT,
                as_of=(known.spot_at or known.facts.as_of).date(),
                source="EC2 spot price history",
                extras=extras,
            )
            for (name, zone), rate in sorted(known.spot.items())
        ]
        offers = [limit(offer, known.quotas) for offer in offers]
        shapes = known.facts.shapes
        return require_images(
            [*offers, *self._list_reserved(known, region)],
            self._settings.get("image"),
            lambda offer: find_default(shapes[offer.instance_type]),
        )

    def _list_reserved(self, known: _Region, region: str) -> list[Offer]:
        offers: dict[str, Offer] = {}
        facts = known.facts
        for each in known.reserved:
            if facts is None or each.type not in facts.shapes or not _opens(each, self._now()):
                continue
            rate = self._reserved_rate(each, facts)
            offer = replace(
                _make(facts.shapes[each.type], region, rate),
                zone=each.zone,
                reserved=True,
                capacity=each.free,
                source=_title(each),
                extras=self._extras(facts),
            )
            best = offers.get(offer.key)
            if best is None or (best.capacity or 0) < each.free:
                offers[offer.key] = offer
        return list(offers.values())

    def _extras(self, facts: RegionFacts) -> tuple[ExtraPrice, ...]:
        """Return the prices of disks and addresses, with the amounts that a node has by default."""
        kind = str(self._settings.get("disk_type") or "gp3")
        size = int(self._settings.get("disk_gib", 100))
        usual = {(ChargeKind.DISK, kind): size, (ChargeKind.ADDRESS, ""): 1}
        return tuple(
            replace(
                each,
                usual=usual.get((each.kind, each.name), 0),
                source="AWS Price List API",
                as_of=facts.as_of.date(),
            )
            for each in facts.extras
        )

    def _reserved_rate(self, reservation: CapacityReservation, facts: RegionFacts) -> HourlyRate:
        given = self._settings.get("reserved_price_usd_hr")
        if given is not None:
            return parse_rate(str(given))
        return HourlyRate(0 if reservation.block else facts.rates.get(reservation.type, 0))


def _make(shape: InstanceShape, region: str, rate: HourlyRate) -> Offer:
    """Return the offer of an instance type, without what differs between its prices."""
    return Offer(
        provider="aws",
        region=region,
        instance_type=shape.type,
        rate=rate,
        minimum_charge=MINUTE,
        **shape.offered(),
    )


def _read_reservation(told: Json, region: str, names: Mapping[str, str]) -> CapacityReservation:
    """Parse a reservation. `names` maps zone ids to zone names. Other accounts can share
    reservations with this account. Because zone names differ between accounts, a shared reservation
    has only the id of its zone.
    """
    state, platform = (
        str(told.get("State", "active")),
        str(told.get("InstancePlatform", "Linux/UNIX")),
    )
    block, end = told.get("ReservationType") == "capacity-block", told.get("EndDate")
    problem = "" if state == "active" else f"it is {state}"
    if platform != "Linux/UNIX" or told.get("Tenancy", "default") != "default":
        problem = (
            f"the reservation is for {platform} with {told.get('Tenancy', 'default')} tenancy; "
            "nodes need Linux/UNIX with default tenancy"
        )
    if block and str(told["InstanceType"]).startswith(_ULTRA):
        problem = "the reservation is for an UltraServer; Cavvy does not support its end times"
    ends_at = end - _BLOCK_CLEARED if block and end is not None else None
    return CapacityReservation(
        id=str(told["CapacityReservationId"]),
        region=region,
        zone=names.get(
            str(told.get("AvailabilityZoneId", "")), str(told.get("AvailabilityZone", ""))
        ),
        type=str(told["InstanceType"]),
        free=int(told.get("AvailableInstanceCount", 0)),
        block=block,
        problem=problem,
        closes_at=ends_at - _LAST_START if ends_at is not None else end,
        ends_at=ends_at,
    )


def _opens(reservation: CapacityReservation, now: datetime) -> bool:
    """Return whether an instance can be started in the reservation now."""
    return not reservation.problem and (
        reservation.closes_at is None or now < reservation.closes_at
    )


def _title(reservation: CapacityReservation) -> str:
    end = f", nodes until {reservation.ends_at:%Y-%m-%d %H:%M} UTC" if reservation.ends_at else ""
    return f"capacity {'block' if reservation.block else 'reservation'} {reservation.id}{end}"


def _describe(reservation: CapacityReservation, now: datetime) -> str:
    where = (
        f"{_title(reservation)}: {reservation.free} x {reservation.type} free in {reservation.zone}"
    )
    if reservation.problem:
        return f"{where}, not used: {reservation.problem}"
    return (
        where if _opens(reservation, now) else f"{where}, not used: the reservation ends too soon"
    )

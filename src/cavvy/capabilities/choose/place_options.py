"""Finds the places among which `cavvy decide` decides, with their facts."""

from collections.abc import Sequence
from datetime import datetime
from math import ceil
from typing import TYPE_CHECKING

from cavvy.capabilities.choose.cost_plan import CostPlanError
from cavvy.capabilities.choose.decision import ASSUMED_ON, ROUND_TRIPS, OptionKind, PlaceOption
from cavvy.capabilities.choose.decision_file import DecisionFile, WorkKind
from cavvy.capabilities.choose.ownership import (
    HOURS_PER_MONTH,
    CostAssumption,
    OwnershipPlan,
    forecast_ownership,
)
from cavvy.catalog.regions import is_region, locate
from cavvy.catalog.residency import BUCKET_PROVIDERS, find_cloud
from cavvy.domain.facts import Fact
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.tasks import SpotPolicy, TaskSpec
from cavvy.domain.units import format_duration
from cavvy.domain.values import Struct, replace
from cavvy.planner.scoring import Courses
from cavvy.planner.transfers import TRANSFER_MBPS
from cavvy.planner.work import estimate, start_time

if TYPE_CHECKING:
    from collections.abc import Mapping

# weeks from the order of own machines until they work: 4-8 weeks in a colocation
_DELIVERY_DAYS = 56
_DELIVERY = (
    "4-8 weeks from order to use in a colocation (public comparisons of 2026); 8 are assumed"
)


class Market(Struct, frozen=True, kw_only=True):
    """The offers for one machine, the egress prices per GB by place with source and date, the
    values for the costs of devices, and the plan of costs, or None if no price of own machines is
    known. `task` is the task that the file states, or None."""

    offers: Sequence[Offer]
    egress: "Mapping[str, Fact]"
    machines: float
    use: float
    overhead: Fact
    tariff: CostAssumption
    life_years: CostAssumption
    plan: OwnershipPlan | None
    task: TaskSpec | None


def describe_task(task: TaskSpec, now: datetime) -> dict[str, object]:
    """Return what a task states of spot, its deadline and its inputs, as values of a file to
    decide: the place that sends most data, and all data that is there. As for `cavvy plan`, a task
    uses spot only if its file says so."""
    spot = any(each.spot is not SpotPolicy.NEVER for each in task.resources.choices)
    found: dict[str, object] = {"preemption": "tolerated" if spot else "refused"}
    limits = task.limits
    after = limits.deadline_after or (limits.deadline - now if limits.deadline else None)
    if after is not None and task.service is None:
        found["deadline_hours"] = max(0.01, round(after.total_seconds() / 3600, 2))
    sizes: dict[str, float] = {}
    for each in task.inputs:
        cloud = BUCKET_PROVIDERS.get(each.source.partition("://")[0])
        if cloud and each.size_mib:
            place = f"{cloud}/{each.region}" if each.region else cloud
            sizes[place] = sizes.get(place, 0.0) + each.size_mib * (1 << 20) / 1e9
    if sizes:
        at = max(sizes, key=lambda place: (sizes[place], place))
        found["data"] = {"gb": round(sizes[at], 3), "at": at}
    return found


def list_places(asked: DecisionFile, market: Market) -> list[PlaceOption]:
    """Return all places, also those that break a requirement. Raises CostPlanError."""
    rented: dict[tuple[str, Purchase, int], list[PlaceOption]] = {}
    served = []
    for offer in market.offers:
        key = offer.provider, offer.purchase, offer.term_months
        rented.setdefault(key, []).append(_rent(asked, market, offer))
        if offer.purchase is Purchase.ON_DEMAND:
            served.append(_serve(asked, market, offer))
    options = [min(each, key=_prefer) for each in rented.values()]
    options += [min(served, key=_prefer)] if served else []
    return [*options, _own(asked, market), _edge(asked, market)]


def _prefer(option: PlaceOption) -> tuple[int, float, str]:
    """Return the order among the offers of one provider: the requirements that each breaks, then
    its cost with that of moving data."""
    return len(option.excluded), option.monthly.value + option.moves.value, option.name


def _breaks(asked: DecisionFile, offer: Offer) -> bool:
    return bool(asked.residency) and not any(
        is_region(each, offer.provider, offer.region, offer.zone) for each in asked.residency
    )


def _rent(asked: DecisionFile, market: Market, offer: Offer) -> PlaceOption:
    spot, reserved = offer.purchase is Purchase.SPOT, bool(offer.term_months)
    always = reserved or asked.kind is WorkKind.SERVICE
    repeated = find_repeated(market, offer) if spot else _not_repeated()
    share = 1.0 if always else market.use * (1 + (repeated.value if repeated else 0))
    usd = float(offer.rate.usd)
    excluded = []
    if repeated is None:
        repeated = market.overhead
        excluded.append("the task is unlikely to finish on spot: write checkpoints")
    if _breaks(asked, offer):
        excluded.append(f"{offer.region} is not in {', '.join(asked.residency)}")
    if spot and not asked.preemption:
        excluded.append("the work does not tolerate preemptions")
    trip = _round_trip(asked, offer)
    finish = _finish(asked, market, offer)
    excluded += _exclude_slow(asked, trip) + _exclude_late(asked, finish)
    term = f" for {offer.term_months} months" if reserved else ""
    return PlaceOption(
        kind=OptionKind.CLOUD,
        name=f"{offer.provider} {offer.region} {offer.instance_type} {offer.purchase}{term}",
        monthly=_price_month(market, offer, share, usd),
        moves=_move(asked, market, _place_of(offer)),
        round_trip=trip,
        repeated=repeated,
        commits=reserved,
        elastic=1 / asked.peak if reserved else 1.0,
        finish=finish,
        excluded=tuple(excluded),
    )


def find_repeated(market: Market, offer: Offer) -> Fact | None:
    """Return the share of the work that preemptions repeat on a spot offer: for a task that states
    its work, the expectation of `cavvy plan`. Returns None if the task is unlikely to finish."""
    task = market.task
    course = Courses(task, 0.0)(offer) if task is not None and task.work is not None else None
    if course is None or course.run_time is None or task is None or task.service is not None:
        return market.overhead
    if course.loss is None or course.loss.time is None:
        return None
    every = course.loss.checkpoint_every
    saved = f"a checkpoint every {format_duration(every)}" if every else "no checkpoint"
    return replace(
        market.overhead,
        value=course.loss.time / course.run_time,
        source=f"{course.loss.per_hour:g} preemptions an hour are assumed, with {saved}",
    )


def _price_month(market: Market, offer: Offer, share: float, usd: float) -> Fact:
    """Return the cost of the machines at `usd` an hour, paid for this share of the hours."""
    return Fact(
        name="cost of a month",
        value=market.machines * share * HOURS_PER_MONTH * usd,
        unit="USD",
        source=f"{offer.source}: {offer.key}",
        as_of=offer.as_of,
        formula=f"{market.machines:g} machines x {share:.2f} x 730 h x ${usd:g}",
    )


def _serve(asked: DecisionFile, market: Market, offer: Offer) -> PlaceOption:
    """Return serverless replicas: machines on demand that are paid only while they are called."""
    trip, finish = _round_trip(asked, offer), _finish(asked, market, offer)
    excluded = _exclude_slow(asked, trip) + _exclude_late(asked, finish)
    impossible = ["serverless replicas answer requests, and do not train"]
    if _breaks(asked, offer):
        excluded.append(f"{offer.region} is not in {', '.join(asked.residency)}")
    return PlaceOption(
        kind=OptionKind.SERVERLESS,
        name=f"serverless replicas, scaled to zero on {offer.provider} {offer.region}",
        monthly=_price_month(market, offer, market.use, float(offer.rate.usd)),
        moves=_move(asked, market, _place_of(offer)),
        round_trip=trip,
        repeated=_not_repeated(),
        commits=False,
        elastic=1.0,
        finish=finish,
        excluded=tuple(excluded),
        impossible=tuple(impossible if asked.kind is WorkKind.TRAINING else ()),
    )


def _own(asked: DecisionFile, market: Market) -> PlaceOption:
    excluded, value = list[str](), 0.0
    source, as_of = "no price of own machines is stated", ASSUMED_ON
    if market.plan is not None:
        own = forecast_ownership(market.plan).find("owned")
        value = own.present / (market.plan.values["years"] * 12)
        price = market.plan.assumptions["owned.price_usd"]
        source, as_of = f"{price.source}; `cavvy tco` lists all assumptions", price.as_of or as_of
    if asked.start_within_days is not None and asked.start_within_days < _DELIVERY_DAYS:
        excluded.append(f"delivery takes {_DELIVERY_DAYS} days ({_DELIVERY})")
    finish = _finish(asked, market, None)
    return PlaceOption(
        kind=OptionKind.OWN,
        name="own machines",
        monthly=Fact(
            name="cost of a month",
            value=value,
            unit="USD, present value",
            source=source,
            as_of=as_of,
            formula="present value of all costs / months",
        ),
        moves=_move(asked, market, "own"),
        round_trip=_trip("site", "own machines are beside the users"),
        repeated=_not_repeated(),
        commits=True,
        elastic=1 / asked.peak,
        finish=finish,
        excluded=tuple(excluded + _exclude_late(asked, finish)),
        impossible=() if market.plan else ("no price is stated (owned.price_usd)",),
    )


def _edge(asked: DecisionFile, market: Market) -> PlaceOption:
    """Return devices that together do the work of the machines."""
    impossible, cost, formula = list[str](), 0.0, ""
    device, tariff, years = asked.edge, market.tariff, market.life_years
    if asked.kind is not WorkKind.SERVICE:
        impossible.append("edge devices answer requests, and do not train")
    elif device is None:
        impossible.append(f"not stated: {', '.join(asked.edge_missing)}")
    elif (asked.model_gb or 0.0) > device.memory_gb:
        impossible.append(
            f"the model needs {asked.model_gb:g} GB, and a device has {device.memory_gb:g} GB"
        )
    if device is not None:
        count = ceil(market.machines / device.speed)
        power = device.power_kw * HOURS_PER_MONTH * tariff.value
        cost = count * (device.price_usd / (12 * years.value) + power)
        formula = (
            f"{market.machines:g} machines / {device.speed:g} = {count:,} devices x "
            f"(${device.price_usd:g} / {12 * years.value:g} months + {device.power_kw:g} kW x "
            f"730 h x ${tariff.value:g})"
        )
    stated = asked.make_fact("edge", "cost of a month", cost, "USD", "no device is stated")
    return PlaceOption(
        kind=OptionKind.EDGE,
        name="edge devices",
        monthly=replace(
            stated,
            source=f"{stated.source}; life: {years.source}; a kWh: {tariff.source}",
            formula=formula,
        ),
        moves=_none("cost of moving data", "assumed by Cavvy: data is made at the edge"),
        round_trip=_trip("site", "edge devices are beside the users"),
        repeated=_not_repeated(),
        commits=True,
        elastic=1 / asked.peak,
        finish=_none("time until the work is done", "no work ends at the edge"),
        impossible=tuple(impossible),
    )


def _none(name: str, source: str) -> Fact:
    return Fact(name=name, value=0.0, unit="", source=source, as_of=ASSUMED_ON)


def _not_repeated() -> Fact:
    return _none("work that is repeated", "assumed by Cavvy: nothing preempts it")


def _finish(asked: DecisionFile, market: Market, offer: Offer | None) -> Fact:
    """Return the hours until the work is done on an offer, or on own machines: their delivery, the
    copy of the data, the start, and the work with what preemptions repeat."""
    name = "time until the work is done"
    if asked.deadline_hours is None or asked.kind is WorkKind.SERVICE:
        return _none(name, "no deadline is stated")
    work, source = asked.work_hours, "the file"
    if work is None and market.task is not None and offer is not None:
        found = estimate(market.task, offer).run_time
        work = found.total_seconds() / 3600 if found else None
        source = "`cavvy estimate` of the task's work"
    if work is None and market.task is not None and offer is None:
        # own machines are those of the file: the fastest estimate of an equal machine
        times = [estimate(market.task, each).run_time for each in market.offers]
        hours = [each.total_seconds() / 3600 for each in times if each]
        work, source = min(hours, default=None), "`cavvy estimate` of the task's work"
    if work is None:
        raise CostPlanError(
            "work_hours is missing beside the deadline",
            "state how long these machines work, such as --set work_hours=20, or `work` in a task",
        )
    spot = offer is not None and offer.purchase is Purchase.SPOT
    share = find_repeated(market, offer) if offer is not None and spot else None
    repeated = share.value if share else 0.0
    place = "own" if offer is None else _place_of(offer)
    copied = 0.0 if asked.data_at in ("", place) else asked.data_gb * 8000 / TRANSFER_MBPS / 3600
    first = _DELIVERY_DAYS * 24 if offer is None else start_time(offer).total_seconds() / 3600
    stated = asked.make_fact("deadline_hours", name, 0.0, "h", "")
    return replace(
        stated,
        value=first + copied + work * (1 + repeated),
        source=f"{source}; {TRANSFER_MBPS / 1000:g} Gbit/s and the start are assumed",
        formula=f"{first:.2f} h to start + {copied:.2f} h copy + {work:.2f} h x {1 + repeated:.3f}",
    )


def _place_of(offer: Offer) -> str:
    """Return the cloud and region, in which managed services share the buckets of their cloud."""
    return f"{find_cloud(offer.provider)}/{offer.region}"


def _exclude_late(asked: DecisionFile, finish: Fact) -> list[str]:
    if asked.deadline_hours is None or finish.value <= asked.deadline_hours:
        return []
    return [
        f"it is done in {finish.value:,.1f} h, and the deadline is in {asked.deadline_hours:g} h"
    ]


def _trip(kind: str, source: str) -> Fact:
    trip = ROUND_TRIPS[kind]
    return Fact(name="round trip", value=trip, unit="ms, assumed", source=source, as_of=ASSUMED_ON)


def _round_trip(asked: DecisionFile, offer: Offer) -> Fact:
    country, area = locate(offer.provider, offer.region)
    where = f"{offer.region} is in {country or area or 'an unknown place'}"
    if not asked.users:
        return _trip("site", "no users are stated, so distance does not count")
    if country in asked.users:
        return _trip("country", where)
    areas = {locate("", each)[1] or _area_of(each) for each in asked.users} | set(asked.users)
    return _trip("area" if area in areas else "elsewhere", where)


def _area_of(country: str) -> str | None:
    from cavvy.catalog.tables import read_table

    rows = read_table("cavvy.catalog", "regions")
    return next((row["area"] for row in rows if row["country"] == country), None)


def _exclude_slow(asked: DecisionFile, trip: Fact) -> list[str]:
    if asked.latency_ms is None or trip.value <= asked.latency_ms:
        return []
    return [f"its round trip is about {trip.value:g} ms, and {asked.latency_ms:g} ms are required"]


def _move(asked: DecisionFile, market: Market, place: str) -> Fact:
    """Return the cost of moving the data to a place each month, at the egress price where the data
    is now. Raises CostPlanError if that price is unknown."""
    name, at = "cost of moving data", asked.data_at
    if not at or at == place:
        return asked.make_fact("data", name, 0.0, "USD a month", "no data is stated")
    if asked.data_usd_gb is None and at.partition("/")[0] == "own":
        return _none(name, "assumed by Cavvy: own networks send for nothing")
    cloud, _, region = at.partition("/")
    if not region and place.startswith(f"{cloud}/") and asked.data_usd_gb is None:
        return _none(name, "assumed by Cavvy: the data is in the region of the machines")
    price = find_move_price(market.egress, at, place)
    if asked.data_usd_gb is not None:
        price = asked.make_fact("data", name, asked.data_usd_gb, "USD a GB", "")
    if price is None:
        known = (each for each in market.egress if each.startswith(f"{at}/") and ">" not in each)
        region = next(known, "")
        named = f"name the region, such as --set data.at={region}; or " if region else ""
        raise CostPlanError(
            f"data.at: the catalog has no price of egress from {at}",
            f"{named}state it in US dollars, such as --set data.usd_gb=0.05",
        )
    return replace(
        price,
        name=name,
        value=asked.data_gb * price.value,
        unit="USD a month",
        formula=f"{asked.data_gb:g} GB x ${price.value:g}",
    )


def find_move_price(egress: "Mapping[str, Fact]", at: str, place: str) -> Fact | None:
    """Return the price of a GB that is sent from one place to another, both provider/region: for
    another region of the same cloud, the price of that region, of any region, or by continent;
    otherwise, and if a cloud states none of these, the price to the internet."""
    cloud, _, region = at.partition("/")
    other, _, target = place.partition("/")
    keys = [at, cloud]
    if other == cloud and region and target:
        home, there = _continent(cloud, region), _continent(cloud, target)
        kind = "continent" if home is not None and home == there else "elsewhere"
        within = [f"{at}>{target}", f"{at}>region", f"{cloud}>region"]
        keys = [*within, f"{cloud}/{home}>{kind}", f"{cloud}>{kind}", *keys]
    return next((egress[each] for each in keys if each in egress), None)


def _continent(cloud: str, region: str) -> str | None:
    area = locate(cloud, region)[1]
    return "north-america" if area == "us" else area

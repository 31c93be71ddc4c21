"""Finds the places among which `cavvy decide` decides, with their facts."""

from collections.abc import Sequence
from datetime import date
from typing import TYPE_CHECKING

from cavvy.catalog.regions import is_region, locate
from cavvy.costs.decision import ROUND_TRIPS, OptionKind, PlaceOption
from cavvy.costs.ownership import HOURS_PER_MONTH, OwnershipPlan, forecast_ownership
from cavvy.domain.facts import Fact
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.values import Struct
from cavvy.spec.decision_file import DecisionFile, WorkKind

if TYPE_CHECKING:
    from collections.abc import Mapping

# weeks from the order of own machines until they work: 4-8 weeks in a colocation
_DELIVERY_DAYS = 56
_DELIVERY = (
    "4-8 weeks from order to use in a colocation (public comparisons of 2026); 8 are assumed"
)
_EDGE_YEARS = 4  # life of an edge device, as that of a server


class Market(Struct, frozen=True, kw_only=True):
    """The offers for one machine, the egress prices per GB by place with source and date, and the
    plan of costs, or None if no price of own machines is known."""

    offers: Sequence[Offer]
    egress: "Mapping[str, Fact]"
    machines: float
    use: float
    overhead: Fact
    plan: OwnershipPlan | None
    today: date


def list_places(asked: DecisionFile, market: Market) -> list[PlaceOption]:
    """Return all places, also those that break a requirement."""
    options = [_rent(asked, market, offer) for offer in _choose_offers(asked, market.offers)]
    usual = [each for each in market.offers if each.purchase is Purchase.ON_DEMAND]
    if usual:
        best = min(usual, key=lambda each: (_breaks(asked, each), each.rate, each.key))
        options.append(_serve(asked, market, best))
    options.append(_own(asked, market))
    options.append(_edge(asked, market))
    return options


def _choose_offers(asked: DecisionFile, offers: Sequence[Offer]) -> list[Offer]:
    """Return the cheapest offer of each provider and purchase option that keeps the residency, or
    if none does, the cheapest of all."""
    best: dict[tuple[str, Purchase, int], Offer] = {}
    for offer in sorted(offers, key=lambda each: (_breaks(asked, each), each.rate, each.key)):
        best.setdefault((offer.provider, offer.purchase, offer.term_months), offer)
    return list(best.values())


def _breaks(asked: DecisionFile, offer: Offer) -> bool:
    return bool(asked.residency) and not any(
        is_region(each, offer.provider, offer.region, offer.zone) for each in asked.residency
    )


def _rent(asked: DecisionFile, market: Market, offer: Offer) -> PlaceOption:
    spot, reserved = offer.purchase is Purchase.SPOT, bool(offer.term_months)
    always = reserved or asked.kind is WorkKind.SERVICE
    share = 1.0 if always else market.use * (1 + market.overhead.value if spot else 1)
    usd = float(offer.rate.usd)
    excluded = []
    if _breaks(asked, offer):
        excluded.append(f"{offer.region} is not in {', '.join(asked.residency)}")
    if spot and not asked.preemption:
        excluded.append("the work does not tolerate preemptions")
    trip = _round_trip(asked, market, offer)
    excluded += _exclude_slow(asked, trip)
    term = f" for {offer.term_months} months" if reserved else ""
    return PlaceOption(
        kind=OptionKind.CLOUD,
        name=f"{offer.provider} {offer.region} {offer.instance_type} {offer.purchase}{term}",
        monthly=Fact(
            name="cost of a month",
            value=market.machines * share * HOURS_PER_MONTH * usd,
            unit="USD",
            source=f"{offer.source}: {offer.key}",
            as_of=offer.as_of,
            formula=f"{market.machines:g} machines x {share:.2f} x 730 h x ${usd:g}",
        ),
        moves=_move(asked, market, f"{offer.provider}/{offer.region}"),
        round_trip=trip,
        repeated=market.overhead
        if spot
        else _none("work that is repeated", "nothing preempts it", market.today),
        commits=reserved,
        elastic=1 / asked.peak if reserved else 1.0,
        excluded=tuple(excluded),
    )


def _serve(asked: DecisionFile, market: Market, offer: Offer) -> PlaceOption:
    """Return serverless replicas: machines on demand that are paid only while they are called."""
    usd = float(offer.rate.usd)
    trip = _round_trip(asked, market, offer)
    excluded = _exclude_slow(asked, trip)
    if asked.kind is WorkKind.TRAINING:
        excluded.append("serverless replicas answer requests, and do not train")
    if _breaks(asked, offer):
        excluded.append(f"{offer.region} is not in {', '.join(asked.residency)}")
    return PlaceOption(
        kind=OptionKind.SERVERLESS,
        name=f"serverless replicas, scaled to zero on {offer.provider} {offer.region}",
        monthly=Fact(
            name="cost of a month",
            value=market.machines * market.use * HOURS_PER_MONTH * usd,
            unit="USD",
            source=f"{offer.source}: {offer.key}",
            as_of=offer.as_of,
            formula=f"{market.machines:g} machines x {market.use:.2f} x 730 h x ${usd:g}",
        ),
        moves=_move(asked, market, f"{offer.provider}/{offer.region}"),
        round_trip=trip,
        repeated=_none("work that is repeated", "nothing preempts it", market.today),
        commits=False,
        elastic=1.0,
        excluded=tuple(excluded),
    )


def _own(asked: DecisionFile, market: Market) -> PlaceOption:
    excluded, value, source = list[str](), 0.0, "no price of own machines is stated"
    if market.plan is None:
        excluded.append("no price is stated (owned.price_usd)")
    else:
        own = forecast_ownership(market.plan).find("owned")
        value = own.present / (market.plan.values["years"] * 12)
        price = market.plan.assumptions["owned.price_usd"]
        source = f"{price.source}; `cavvy tco` lists all assumptions"
    if asked.start_within_days is not None and asked.start_within_days < _DELIVERY_DAYS:
        excluded.append(f"delivery takes {_DELIVERY_DAYS} days ({_DELIVERY})")
    return PlaceOption(
        kind=OptionKind.OWN,
        name="own machines",
        monthly=Fact(
            name="cost of a month",
            value=value,
            unit="USD, present value",
            source=source,
            as_of=market.today,
            formula="present value of all costs / months",
        ),
        moves=_move(asked, market, "own"),
        round_trip=_trip("site", "own machines are beside the users", market.today),
        repeated=_none("work that is repeated", "nothing preempts it", market.today),
        commits=True,
        elastic=1 / asked.peak,
        excluded=tuple(excluded),
    )


def _edge(asked: DecisionFile, market: Market) -> PlaceOption:
    excluded = []
    if asked.edge_usd is None:
        excluded.append("no device is stated (edge.price_usd)")
    if asked.kind is not WorkKind.SERVICE:
        excluded.append("edge devices answer requests, and do not train")
    tariff = market.plan.values["owned.tariff_usd_kwh"] if market.plan else 0.15
    power = asked.edge_kw * HOURS_PER_MONTH * tariff
    return PlaceOption(
        kind=OptionKind.EDGE,
        name="edge devices",
        monthly=Fact(
            name="cost of a month",
            value=market.machines * ((asked.edge_usd or 0.0) / (12 * _EDGE_YEARS) + power),
            unit="USD",
            source=f"the file; {_EDGE_YEARS} years of life and ${tariff:g} a kWh are assumed",
            as_of=market.today,
            formula="price / months + kW x 730 h x tariff, one device for each machine",
        ),
        moves=_none("cost of moving data", "data is made at the edge", market.today),
        round_trip=_trip("site", "edge devices are beside the users", market.today),
        repeated=_none("work that is repeated", "nothing preempts it", market.today),
        commits=True,
        elastic=1 / asked.peak,
        excluded=tuple(excluded),
    )


def _none(name: str, source: str, today: date) -> Fact:
    return Fact(name=name, value=0.0, unit="", source=source, as_of=today)


def _trip(kind: str, source: str, today: date) -> Fact:
    trip = ROUND_TRIPS[kind]
    return Fact(name="round trip", value=trip, unit="ms, assumed", source=source, as_of=today)


def _round_trip(asked: DecisionFile, market: Market, offer: Offer) -> Fact:
    country, area = locate(offer.provider, offer.region)
    where = f"{offer.region} is in {country or area or 'an unknown place'}"
    if not asked.users:
        return _trip("site", "no users are stated, so distance does not count", market.today)
    if country in asked.users:
        return _trip("country", where, market.today)
    areas = {locate("", each)[1] or _area_of(each) for each in asked.users} | set(asked.users)
    return _trip("area" if area in areas else "elsewhere", where, market.today)


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
    is now."""
    if not asked.data_gb or not asked.data_at or asked.data_at == place:
        return _none("cost of moving data", "the data is there, or none is stated", market.today)
    provider = asked.data_at.partition("/")[0]
    if provider == "own":
        return _none(
            "cost of moving data", "own networks send for nothing, by assumption", market.today
        )
    price = market.egress.get(asked.data_at) or market.egress.get(provider)
    if price is None:
        return _none(
            "cost of moving data",
            f"the catalog has no egress price of {asked.data_at}",
            market.today,
        )
    return Fact(
        name="cost of moving data",
        value=asked.data_gb * price.value,
        unit="USD a month",
        source=price.source,
        as_of=price.as_of,
        formula=f"{asked.data_gb:g} GB x ${price.value:g}",
    )

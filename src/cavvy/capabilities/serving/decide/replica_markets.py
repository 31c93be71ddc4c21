"""Finds the markets in which the replicas of a service may run, and restricts a task to one of
these markets.

If the service uses no spot capacity, it has one market, `ANYWHERE`, in which the planner chooses
the offer of each replica as for every job. If the service uses spot capacity, each location with
spot capacity is a separate market, `ON_DEMAND` is another market, and the spot policy distributes
the replicas among these markets.

Separates replicas whose programs listen on the same port. On the server's machine, all replicas
share the machine's ports. If two programs used the same port, only the first could listen, and
would also get the requests for the second.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime, timedelta

from cavvy.capabilities.serving.replicas import (
    ReplicaLoss,
    ReplicaState,
    ServiceReplica,
    ServingMarket,
)
from cavvy.capabilities.serving.stored_services import StoredService
from cavvy.domain.jobs import Attempt, AttemptOutcome
from cavvy.domain.offers import Offer, Purchase, list_sellers
from cavvy.domain.services import HERE
from cavvy.domain.tasks import ResourceSpec, SpotPolicy, TaskSpec
from cavvy.domain.values import replace
from cavvy.planner.work import start_time

ANYWHERE = ""
ON_DEMAND = "on-demand"
# Spot markets beyond the cheapest ones would hardly ever be chosen.
_MOST_MARKETS = 12
# how long nothing is ordered in a spot market that has lost or refused a replica
_PAUSE = timedelta(seconds=30)
_LOST = frozenset({AttemptOutcome.PREEMPTED, AttemptOutcome.NODE})
_REFUSED = frozenset({AttemptOutcome.CAPACITY, AttemptOutcome.REFUSED, AttemptOutcome.TIMEOUT})


def place_of(offer: Offer) -> str:
    """Return a readable location of the replica: account, zone and purchase option."""
    return f"{offer.account}/{offer.zone or offer.region}/{offer.purchase}"


def uses_spot(task: TaskSpec) -> bool:
    return any(each.spot is not SpotPolicy.NEVER for each in task.resources.choices)


def list_markets(offers: Iterable[Offer]) -> tuple[ServingMarket, ...]:
    """Return the markets of these offers in an order that does not depend on their prices, with the
    on-demand market first. Only the cheapest spot markets are returned.
    """
    found: dict[str, ServingMarket] = {}
    for offer in offers:
        market = _market_of(offer)
        if market.name not in found or market.rate < found[market.name].rate:
            found[market.name] = market
    spot = sorted((each for each in found.values() if each.spot), key=lambda each: each.rate)
    rest = [each for each in found.values() if not each.spot]
    return (*rest, *sorted(spot[:_MOST_MARKETS], key=lambda each: each.name))


def _market_of(offer: Offer) -> ServingMarket:
    boot_s = start_time(offer).total_seconds()
    if offer.purchase is not Purchase.SPOT:
        return ServingMarket(name=ON_DEMAND, rate=offer.rate, boot_s=boot_s)
    return ServingMarket(
        name=place_of(offer),
        provider=offer.provider,
        region=f"{offer.provider}/{offer.region}",
        place=offer.zone or offer.region,
        spot=True,
        rate=offer.rate,
        boot_s=boot_s,
    )


def narrow(task: TaskSpec, market: ServingMarket) -> TaskSpec:
    """Return the task, restricted to the market."""
    needs = task.resources
    choices = tuple(_narrow(each, market) for each in needs.any_of)
    return replace(task, resources=replace(_narrow(needs, market), any_of=choices))


def _narrow(needs: ResourceSpec, market: ServingMarket) -> ResourceSpec:
    if not market.spot:
        return replace(needs, spot=SpotPolicy.NEVER)
    return replace(
        needs, spot=SpotPolicy.ONLY, providers=(market.provider,), regions=(market.place,)
    )


def is_spot(replica: ServiceReplica) -> bool:
    """Return whether the replica was ordered in a spot market."""
    return _is_spot_market(replica.market)


def market_of(replica: ServiceReplica) -> str:
    """Return the market to which the replica belongs. A replica that was ordered without a
    particular market belongs to the market in which it runs.
    """
    if replica.market:
        return replica.market
    return replica.place if _is_spot_market(replica.place) else ON_DEMAND


def _is_spot_market(name: str) -> bool:
    return name.endswith(f"/{Purchase.SPOT}")


def merge_markets(service: StoredService, found: Sequence[ServingMarket]) -> StoredService:
    """Return the service with a new list of markets. The list contains the markets in `found`, and
    all markets in which replicas of the current revision still run. Markets in which only replicas
    of older revisions run are left out, because the current revision may forbid these markets.
    """
    ours = [each for each in service.open if each.revision == service.revision]
    names, used = {each.name for each in found}, {market_of(each) for each in ours}
    left = [each for each in service.markets if each.name in used - names]
    return replace(service, markets=(*found, *left))


# Regions


# How markets affect replicas


def find_loss(attempt: Attempt | None) -> ReplicaLoss | None:
    """Return how the market ended the attempt (a refusal or a loss), or None if the attempt ended
    for another reason.
    """
    if attempt is None or attempt.offer.purchase is not Purchase.SPOT:
        return None
    if attempt.outcome in _LOST:
        return ReplicaLoss.LOST
    return ReplicaLoss.REFUSED if attempt.outcome in _REFUSED else None


def list_missing(
    placement: Mapping[str, int],
    living: Sequence[ServiceReplica],
    gone: Sequence[ServiceReplica],
    now: datetime,
) -> tuple[str, ...]:
    """Return the markets in which replicas must be ordered, one entry for each replica, until each
    market has its wanted number of replicas. `living` are the replicas that run, start or will
    start, and `gone` are the replicas that are ending or have ended. If a replica in a spot market
    has just been lost, or the provider has just refused to start one there, no replica is ordered
    in this market for a while.
    """
    pausing = {
        each.market
        for each in gone
        if is_spot(each) and each.loss is not None and now - (each.ended_at or now) < _PAUSE
    }
    missing: list[str] = []
    for name, count in placement.items():
        held = sum(market_of(each) == name for each in living)
        if name not in pausing:
            missing += [name] * (count - held)
    return tuple(missing)


def find_holder(
    service: StoredService, services: Iterable[StoredService], *, replaces: bool = True
) -> str:
    """Find a service that prevents a replica of `service` from using its port on the server's
    machine, because one of its own replicas uses the port, or may use it. Returns the name of this
    service, or "". If a new revision of `service` replaces the others immediately, `replaces` is
    True, and the replicas of the other revisions are ignored. For a canary, `replaces` is False.
    """
    port = service.spec.port
    for other in (service, *(each for each in services if each.id != service.id)):
        for replica in other.open:
            replaced = replaces and other is service and replica.revision != service.revision
            if replica.port == port and not replaced and _may_be_here(replica):
                return other.name
    return ""


def _may_be_here(replica: ServiceReplica) -> bool:
    """Return whether the replica runs, or may later run, on the server's machine."""
    if replica.state is ReplicaState.ENDED or (replica.providers and HERE not in replica.providers):
        return False
    return not replica.gang and (not replica.place or replica.place.startswith(f"{HERE}/"))


def keep_at(task: TaskSpec, providers: Collection[str]) -> TaskSpec:
    """Return the task, with its permitted providers restricted to `providers`."""

    def restrict(need: ResourceSpec) -> ResourceSpec:
        allowed = tuple(
            each for each in need.providers or providers if list_sellers((each,)) & {*providers}
        )
        return replace(need, providers=allowed)

    restricted = (restrict(replace(each, any_of=())) for each in task.resources.choices)
    kept = tuple(each for each in restricted if each.providers)
    if not kept:
        return task
    choices = kept if len(kept) > 1 else ()
    return replace(task, resources=replace(kept[0], any_of=choices, ordered=task.resources.ordered))

"""Decides which replicas a service needs because requests must stay in certain places.

Replicas in other places cannot serve a request that is bound to a place, so the needs of bound
requests are computed separately from the load. Some requests must stay in a set of places P, for
example in some regions. For each P, this module decides whether a replica in P is needed, which
replica is kept for P, and whether a new replica must be ordered. The rules are:

* Needed: a replica is needed while a request for P waits, or if the last request for P arrived
  within `replicas.idle`. The empty set P stands for requests that may be served anywhere; any
  replica can serve these requests.
* Kept: if a replica is needed for P, Cavvy keeps one replica of the newest revision, even if the
  load alone would need fewer replicas. The kept replica runs where all requests for P may be
  served, or was ordered for P and has no place yet. If several replicas could be kept, Cavvy keeps
  the one that it would otherwise end last.
* Missing: if requests for P wait and no replica can be kept for P, a replica is ordered in regions
  within P, unless the service has its maximum number of replicas.
* Full: the service already has its maximum number of replicas, but none of them can serve requests
  for P. These requests wait until another replica ends, or until their time limit has passed.

A replica that was ordered for P ends if it finds no offer within `OFFER_WAIT`. Otherwise, replicas
that wait for places without capacity could be so many that the service may order no others. When
`RETRY_AFTER` has passed since the end of such a replica, another one is ordered.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta

from cavvy.capabilities.serving.decide.replica_markets import ANYWHERE, ON_DEMAND
from cavvy.capabilities.serving.loads import PlaceLoads, read_places, write_places
from cavvy.capabilities.serving.replicas import (
    COMING_REPLICAS,
    ReplicaLoss,
    ServiceReplica,
    ServingMarket,
    UnplacedRequests,
)
from cavvy.capabilities.serving.stored_services import StoredService
from cavvy.catalog.regions import (
    list_places_around,
    places_of,
)
from cavvy.control.decide.task_places import place_in_regions
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import ResourceSpec, TaskSpec
from cavvy.domain.values import Struct, replace

OFFER_WAIT = timedelta(seconds=30)
RETRY_AFTER = timedelta(seconds=60)

Places = frozenset[str]


class PlaceNeed(Struct, frozen=True, kw_only=True):
    """A set of places in which the service needs a replica, and the number of requests that wait
    for this replica.
    """

    places: Places
    waiting: int


class BoundOrder(Struct, frozen=True, kw_only=True):
    """States where a new replica must run: in all of `places`, and in the market. If the market is
    "", the planner chooses the offer.
    """

    places: tuple[str, ...]
    market: str = ANYWHERE


class BoundOrders(Struct, frozen=True, kw_only=True):
    """The replicas to order, and the requests for which no replica can be ordered because the
    service has its maximum number of replicas.
    """

    orders: tuple[BoundOrder, ...] = ()
    full: tuple[UnplacedRequests, ...] = ()


class KeptReplicas(Struct, frozen=True, kw_only=True):
    """The IDs of the replicas that are kept because requests must stay in certain places, and the
    sets of places that still need a replica.
    """

    ids: frozenset[str] = frozenset()
    missing: tuple[PlaceNeed, ...] = ()


def list_needs(loads: PlaceLoads, idle: timedelta, now: datetime) -> Sequence[PlaceNeed]:
    """Return the sets of places in which the service needs a replica. The largest sets of places
    come first, because a replica that serves a large set may also serve other sets.
    """
    since = (now - idle).timestamp()
    found = [
        PlaceNeed(places=read_places(name), waiting=load.waiting)
        for name, load in loads.items()
        if load.waiting or load.asked_at > since
    ]
    return sorted(found, key=lambda each: (-len(each.places), -each.waiting, sorted(each.places)))


def keep_replicas(needs: Sequence[PlaceNeed], replicas: Sequence[ServiceReplica]) -> KeptReplicas:
    """Return the replicas to keep. `replicas` contains the replicas of the newest revision that
    serve, will serve or could serve again. The replicas that would end last come first.
    """
    kept: set[str] = set()
    missing = []
    for need in needs:
        fitting = [each for each in replicas if serves(each, need.places)]
        if not need.places:
            # A replica that was ordered for places ends when these are no longer needed, so another
            # one is kept for the requests that may go anywhere.
            fitting = [each for each in fitting if not each.bound_to] or fitting
        if fitting and not any(each.id in kept for each in fitting):
            kept.add(fitting[0].id)
        elif not fitting and need.places and need.waiting:
            missing.append(need)
    return KeptReplicas(ids=frozenset(kept), missing=tuple(missing))


def serves(replica: ServiceReplica, places: Places) -> bool:
    """Return whether the replica may get requests that must stay in all these places, now or after
    its start.
    """
    if not replica.places and replica.state in COMING_REPLICAS:
        return places.issubset(replica.bound_to)
    return places.issubset(replica.places)


def list_possible(
    service: StoredService,
    needs: Iterable[PlaceNeed],
    gone: Iterable[ServiceReplica],
    now: datetime,
) -> Sequence[PlaceNeed]:
    """Return the needs for which a replica can be ordered now. A need is left out if the service
    may not run in its places, or if a replica for these places has recently found no offer.
    """
    refused = {
        frozenset(each.bound_to)
        for each in gone
        if each.loss is ReplicaLoss.REFUSED and now - (each.ended_at or now) < RETRY_AFTER
    }
    return [
        each
        for each in needs
        if each.places not in refused and find_order(service, each.places) is not None
    ]


def find_orders(
    service: StoredService,
    needs: Iterable[PlaceNeed],
    replicas: Sequence[ServiceReplica],
) -> BoundOrders:
    """Return the orders for missing replicas. `replicas` contains the replicas that count towards
    the maximum of the service. The replicas that would end last come first.
    """
    room = max(0, service.spec.replicas.most - len(replicas))
    orders: list[BoundOrder] = []
    full: list[UnplacedRequests] = []
    last = replicas[-1].number if replicas else 0
    for each in needs:
        order = find_order(service, each.places)
        if order is None:
            continue
        if len(orders) < room:
            orders.append(order)
        else:
            full.append(UnplacedRequests(places=write_places(each.places), instead=last))
    return BoundOrders(orders=tuple(orders), full=tuple(full))


def share_orders(
    count: int, needs: Iterable[PlaceNeed], coming: Iterable[Places], waiting: int
) -> Sequence[Places]:
    """Return a set of places for each of `count` additional replicas. The function assigns one
    replica after the other to the set with the highest number of waiting requests for each replica
    already ordered for this set. An empty set stands for any place. `coming` contains the places of
    the replicas already ordered, and `waiting` is the number of all waiting requests.
    """
    groups = {each.places: each.waiting for each in needs if each.places}
    groups[frozenset()] = max(0, waiting - sum(groups.values()))
    known = list(coming)
    found: list[Places] = []
    for _ in range(count):
        held = Counter(known + found)
        _, _, chosen = max(
            (waits / (1 + held[each]), not each, sorted(each)) for each, waits in groups.items()
        )
        found.append(frozenset(chosen))
    return found


# The regions of a replica


def restrict_to_places(task: TaskSpec, places: Places) -> TaskSpec | None:
    """Return the task, restricted to regions that are within all these places, or None if the task
    permits no such region.
    """

    def restrict(needs: ResourceSpec) -> ResourceSpec | None:
        regions = _intersect(needs.regions, places)
        return replace(needs, regions=regions) if regions else None

    if not places:
        return task
    choices = [each for each in map(restrict, task.resources.any_of) if each is not None]
    base = restrict(task.resources)
    if task.resources.any_of and choices:
        base = replace(base or task.resources, any_of=tuple(choices))
    elif task.resources.any_of:
        base = None
    return None if base is None else replace(task, resources=base)


def _intersect(regions: tuple[str, ...], places: Places) -> tuple[str, ...]:
    """Return the regions in which a replica satisfies both conditions: it is in all of `places`
    and, if `regions` is not empty, in one of `regions`. The regions in the result are as large as
    possible.
    """
    found = regions or tuple(sorted(places))[:1]
    for place in sorted(places):
        found = tuple(
            narrow for each in found if (narrow := _find_narrower(each, place)) is not None
        )
    return tuple(dict.fromkeys(found))


def _find_narrower(one: str, other: str) -> str | None:
    """Return the narrower of two places if one place is within the other, or None if neither place
    is known to contain the other.
    """
    if other in list_places_around(one):
        return one
    return other if one.strip().lower() in list_places_around(other) else None


def find_order(service: StoredService, places: Places) -> BoundOrder | None:
    """Return an order for a replica in these places, or None if the service may not run in them.
    Requests are waiting for the replica, so a service whose markets include on-demand capacity gets
    an on-demand replica. If the service permits only spot capacity, the replica is ordered in the
    cheapest spot market of these places.
    """
    if restrict_to_places(place_in_regions(service.task), places) is None:
        return None
    names = tuple(sorted(places))
    if not service.markets:
        return BoundOrder(places=names)
    spot = [each for each in service.markets if each.spot and places <= _places_of(each)]
    demand = [each for each in service.markets if each.name == ON_DEMAND]
    market = min(demand or spot, key=lambda each: each.rate, default=None)
    return None if market is None else BoundOrder(places=names, market=market.name)


def _places_of(market: ServingMarket) -> Places:
    return places_of(market.provider, market.region.partition("/")[2])


def find_places(offer: Offer) -> tuple[str, ...]:
    """Return the names of the known places in which a replica on this offer runs."""
    return tuple(sorted(places_of(offer.provider, offer.region)))

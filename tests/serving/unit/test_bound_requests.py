"""Requests that must stay in a place start a replica there, within the service's maximum."""

from datetime import timedelta
from typing import Any

import pytest
from tests.serving.unit.test_decide_service import NOW, RUNS, SPEC, TASK, make

from cavvy.capabilities.serving.decide.bound_requests import (
    OFFER_WAIT,
    RETRY_AFTER,
    PlaceNeed,
    find_order,
    list_needs,
    restrict_to_places,
    share_orders,
)
from cavvy.capabilities.serving.decide.replica_markets import ON_DEMAND
from cavvy.capabilities.serving.decide.service import (
    ReplicaSeen,
    ServiceSnapshot,
    ServiceStep,
    change_last,
    decide_service,
    list_serving,
    make_replica_task,
    order_replica,
)
from cavvy.capabilities.serving.loads import PlaceLoad, PlaceLoads
from cavvy.capabilities.serving.replicas import ReplicaState, ServiceReplica, ServingMarket
from cavvy.capabilities.serving.stored_services import StoredService
from cavvy.control.decide.task_places import place_in_regions
from cavvy.domain.jobs import JobPhase
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.services import ReplicaCount
from cavvy.domain.tasks import ResourceSpec
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import replace

US, EU = "us-east-1", "eu-west-1"
IDLE = SPEC.replicas.idle


def make_offer(region: str) -> Offer:
    return Offer(
        provider="aws",
        instance_type="m",
        region=region,
        zone=f"{region}a",
        purchase=Purchase.ON_DEMAND,
        rate=HourlyRate(10),
    )


class World:
    """A service whose replicas start at once: those without a place in the US. Regions in `full`
    have no offers.
    """

    def __init__(self, target: int = 1, most: int = 4) -> None:
        spec = replace(SPEC, replicas=ReplicaCount(least=0, most=most))
        self.service = replace(make(target=target), task=replace(TASK, service=spec))
        self.now = NOW
        self.full: set[str] = set()
        self.asked: dict[str, float] = {}
        self.step = ServiceStep(service=self.service)

    def look(self, replica: ServiceReplica) -> ReplicaSeen:
        region = EU if "eu" in replica.bound_to else US
        if replica.state is ReplicaState.ENDING:
            return ReplicaSeen(phase=JobPhase.STOPPED)
        if region in self.full and replica.running_at is None:
            return ReplicaSeen(phase=JobPhase.QUEUED, reason="no offers")
        return replace(RUNS, offer=make_offer(region))

    def run(self, seconds: int = 1, **waiting: int) -> "World":
        """Let the seconds pass while so many requests wait in each place."""
        for _ in range(seconds):
            self.now += timedelta(seconds=1)
            self.asked |= {place: self.now.timestamp() for place in waiting}
            loads = {
                place.replace("anywhere", ""): PlaceLoad(
                    waiting=waiting.get(place, 0), asked_at=asked_at
                )
                for place, asked_at in self.asked.items()
            }
            seen = {each.id: self.look(each) for each in self.service.open}
            view = ServiceSnapshot(
                service=self.service, seen=seen, backlog=sum(waiting.values()), places=loads
            )
            self.step = decide_service(view, self.now)
            service = self.step.service
            for each in self.step.bound:
                service = change_last(self.order(service, each.market), bound_to=each.places)
            for market in self.step.orders:
                service = self.order(service, market)
            self.service = service
        return self

    def order(self, service: StoredService, market: str) -> StoredService:
        return order_replica(service, f"r{service.ordered + 1}", 80, self.now, market)

    def serving(self) -> list[str]:
        return sorted(each.places[-1] for each in list_serving(self.service))


def test_a_waiting_request_starts_a_replica_in_its_place_and_no_other_one_ends() -> None:
    world = World().run(5, anywhere=1)
    assert world.serving() == ["us-east-1"]
    world.run(1, eu=1)
    assert [(each.places, each.market) for each in world.step.bound] == [(("eu",), "")]
    assert world.step.orders == ()
    world.run(1, eu=1)
    assert world.step.bound == (), "the replica is on its way"
    world.run(20, eu=0, anywhere=0)
    assert {frozenset(each.places) for each in list_serving(world.service)} == {
        frozenset(("us-east-1", "us")),
        frozenset(("eu-west-1", "ie", "eu", "europe")),
    }, "both kinds of requests have a replica, although the load needs only one"
    seconds = int(IDLE.total_seconds())
    world.run(seconds - 5, anywhere=0)
    assert len(list_serving(world.service)) == 2
    world.run(seconds, anywhere=0)
    assert world.serving() == ["us-east-1"], "no request had to stay in the EU for a while"


def test_the_replica_elsewhere_ends_if_all_requests_must_stay_in_one_place() -> None:
    world = World().run(5, anywhere=1).run(5, eu=1).run(int(IDLE.total_seconds()) + 60, eu=0)
    assert [each.places[-1] for each in list_serving(world.service)] == ["ie"]
    assert len(world.service.open) == 1


def test_a_cold_service_starts_its_first_replica_where_the_request_must_stay() -> None:
    world = World(target=0).run(1, eu=1)
    assert ([each.places for each in world.step.bound], world.step.orders) == ([("eu",)], ())
    world.run(10, eu=0)
    assert world.service.ordered == 1


def test_a_request_that_no_replica_waits_for_orders_none() -> None:
    assert World(target=0).run(3, eu=0).service.ordered == 0
    both = World().run(3, **{"eu,ie": 1}).run(3, eu=1)
    assert both.service.ordered == 1, "a replica in Ireland is in the EU"


def test_the_maximum_prevents_a_replica_and_says_which_one_would_have_to_end() -> None:
    world = World(target=2, most=2).run(5, anywhere=2)
    world.run(1, eu=1)
    assert (world.step.bound, world.step.orders) == ((), ())
    [unplaced] = world.service.unplaced
    assert (unplaced.places, unplaced.instead) == ("eu", 2), "the youngest would end first"
    world.service = replace(
        world.service,
        replicas=tuple(
            replace(each, state=ReplicaState.ENDING) if each.number == 2 else each
            for each in world.service.replicas
        ),
    )
    world.run(1, eu=1)
    assert [each.places for each in world.step.bound] == [("eu",)], "the waiting request is first"
    assert world.run(5, eu=0).service.unplaced == ()
    assert len(list_serving(world.service)) == 2


def test_a_place_without_offers_does_not_occupy_the_maximum() -> None:
    world = World(target=0, most=1)
    world.full = {EU}
    wait, again = int(OFFER_WAIT.total_seconds()), int(RETRY_AFTER.total_seconds())
    world.run(wait, eu=1, anywhere=1)
    assert [each.bound_to for each in world.service.open] == [("eu",)]
    world.run(5, eu=1, anywhere=1)
    assert world.serving() == [US]
    assert (world.service.failures, world.service.unplaced) == (0, ()), "it may start elsewhere"
    world.run(again, eu=1)
    assert [each.places for each in world.service.unplaced] == ["eu"]
    ended = [each for each in world.service.replicas if each.state is ReplicaState.ENDED]
    assert [each.reason for each in ended] == ["no offer in eu: no offers"]


def test_replicas_for_a_backlog_start_where_the_requests_wait() -> None:
    world = World(target=3).run(1, eu=90, anywhere=10)
    assert [each.places for each in world.step.bound] == [("eu",)] * 3
    eu, us = frozenset({"eu"}), frozenset({"us"})
    needs = [PlaceNeed(places=eu, waiting=6), PlaceNeed(places=us, waiting=2)]
    assert share_orders(4, needs, [eu], 8) == [eu, us, eu, eu]
    assert share_orders(2, needs, [eu, us], 20) == [frozenset()] * 2
    assert share_orders(2, (), [], 0) == [frozenset()] * 2


def test_a_service_with_markets_orders_on_demand_or_where_spot_is() -> None:
    spot = [
        ServingMarket(
            name=f"aws/{region}a/spot",
            provider="aws",
            region=f"aws/{region}",
            place=f"{region}a",
            spot=True,
            rate=HourlyRate(1),
        )
        for region in (US, EU)
    ]
    world = World(target=0)
    world.service = replace(world.service, markets=tuple(spot))
    assert [each.market for each in world.run(1, eu=1).step.bound] == [spot[1].name]
    assert world.run(1, jp=1).step.bound == (), "there is no market"
    mixed = World(target=1)
    demand = ServingMarket(name=ON_DEMAND, rate=HourlyRate(9))
    mixed.service = replace(mixed.service, markets=(demand, *spot), placement={spot[0].name: 1})
    mixed.run(1, eu=1)
    assert [each.market for each in mixed.step.bound] == [ON_DEMAND]
    mixed.run(30, eu=0)
    assert ON_DEMAND in {each.market for each in list_serving(mixed.service)}, "it is kept"


@pytest.mark.parametrize(
    ("regions", "places", "found"),
    [
        ((), {"eu"}, ("eu",)),
        ((), {"eu", "de"}, ("de",)),
        ((), {"europe", "eu"}, ("eu",)),
        ((), {"de", "fr"}, None),
        (("eu-west-1", "us"), {"eu"}, ("eu-west-1",)),
        (("eu",), {"de"}, ("de",)),
        (("us-central1-a",), {"us-central1"}, ("us-central1-a",)),
        (("us",), {"eu"}, None),
        (("nowhere-1",), {"eu"}, None),
        (("nowhere-1",), {"nowhere-1"}, ("nowhere-1",)),
    ],
)
def test_the_replica_of_a_request_is_restricted_to_its_places(
    regions: tuple[str, ...], places: set[str], found: tuple[str, ...] | None
) -> None:
    def restrict(**more: Any) -> tuple[tuple[str, ...], ...] | None:
        task = replace(TASK, resources=ResourceSpec(**more))
        narrow = restrict_to_places(task, frozenset(places))
        return None if narrow is None else tuple(e.regions for e in narrow.resources.choices)

    assert restrict(regions=regions) == (None if found is None else (found,))
    mixed = restrict(any_of=(ResourceSpec(regions=regions), ResourceSpec(regions=("mars",))))
    assert mixed == (None if found is None else (found,)), "a choice elsewhere is left out"
    task = replace(TASK, resources=ResourceSpec(regions=regions))
    assert restrict_to_places(task, frozenset()) == task


def test_the_job_of_the_replica_is_restricted() -> None:
    task = replace(TASK, service=replace(SPEC, regions=(US, EU)))
    assert make_replica_task(task, "chat-1", 80, None, ("eu",)).resources.regions == (EU,)
    assert place_in_regions(task).resources.regions == (US, EU)


def test_loads_are_those_of_now() -> None:
    loads: PlaceLoads = {"eu": PlaceLoad(waiting=0, asked_at=NOW.timestamp())}
    service = make("ready", target=0)
    later = NOW + IDLE + timedelta(seconds=1)
    step = decide_service(ServiceSnapshot(service=service, seen={"r1": RUNS}, places=loads), later)
    assert [each.state for each in step.service.replicas] == [ReplicaState.DRAINING]


def test_a_place_without_offers_on_demand_is_served_by_its_cheapest_spot_market() -> None:
    markets = tuple(
        ServingMarket(
            name=f"aws/{zone}/spot",
            spot=True,
            provider="aws",
            region=f"aws/{zone[:-1]}",
            rate=HourlyRate(rate),
        )
        for zone, rate in (("eu-west-1a", 5), ("eu-west-1b", 3), ("us-east-1a", 1))
    )
    service = replace(make(), markets=markets)
    for given in (markets, markets[::-1]):
        order = find_order(replace(service, markets=given), frozenset({"eu"}))
        assert order is not None
        assert order.market == "aws/eu-west-1b/spot"
    fixed = ServingMarket(name=ON_DEMAND, spot=False, rate=HourlyRate(9))
    order = find_order(replace(service, markets=(*markets, fixed)), frozenset({"eu"}))
    assert order is not None
    assert order.market == ON_DEMAND


def test_a_place_needs_a_replica_while_requests_wait_or_were_made_lately() -> None:
    since = (NOW - IDLE).timestamp()
    loads = {
        "a": PlaceLoad(waiting=0, asked_at=since),
        "b": PlaceLoad(waiting=1, asked_at=since - 9),
        "c": PlaceLoad(waiting=0, asked_at=since + 1),
    }
    assert [sorted(each.places) for each in list_needs(loads, IDLE, NOW)] == [["b"], ["c"]]

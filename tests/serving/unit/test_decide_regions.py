"""A service over several regions and markets: a region that is lost, and spot that is not granted.

The production decisions run in a small world: zones have spot capacity or not, and on-demand nodes
start at once.
"""

from datetime import timedelta

import pytest
from tests.records import make_job_record
from tests.serving.unit.test_decide_service import NOW, SPEC, TASK

from cavvy.capabilities.serving.decide.replica_markets import ON_DEMAND, list_markets
from cavvy.capabilities.serving.decide.service import (
    ReplicaSeen,
    ServiceSnapshot,
    decide_service,
    list_serving,
    make_replica_task,
    order_replica,
)
from cavvy.capabilities.serving.decide.traffic import ServiceTraffic, scale
from cavvy.capabilities.serving.replicas import ReplicaLoss, ReplicaState, ServiceReplica
from cavvy.capabilities.serving.stored_services import StoredService
from cavvy.control.decide.placement import MarketSnapshot, list_usable
from cavvy.domain.jobs import JobPhase
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.services import ReplicaCount
from cavvy.domain.tasks import ResourceSpec, SpotPolicy
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import replace
from cavvy.planner.candidates import OfferedMarket, jobs_of

ZONES = ("eu-west-1a", "eu-west-1b", "us-east-1a", "us-east-1b")
NODE = {"provider": "aws", "instance_type": "m"}


class World:
    """A service with at least three replicas, and the zones that have spot capacity."""

    def __init__(self) -> None:
        offers = [self.make_offer(zone, Purchase.SPOT) for zone in ZONES]
        self.demand = self.make_offer("us-east-1a", Purchase.ON_DEMAND)
        self.offers = {f"aws/{each.zone}/spot": each for each in offers}
        self.up, self.now, self.number = set(ZONES), NOW, 0
        spec = replace(SPEC, replicas=ReplicaCount(least=3, most=6), regions=("eu", "us"))
        needs = ResourceSpec(spot=SpotPolicy.AUTO)
        self.service = StoredService(
            project="p",
            name="chat",
            id="s",
            task=replace(TASK, resources=needs, service=spec),
            created_at=NOW,
            markets=list_markets([self.demand, *offers]),
        )

    @staticmethod
    def make_offer(zone: str, purchase: Purchase) -> Offer:
        rate = HourlyRate(3 if purchase is Purchase.SPOT else 10)
        return Offer(**NODE, region=zone[:-1], zone=zone, purchase=purchase, rate=rate)

    def look(self, replica: ServiceReplica) -> ReplicaSeen:
        offer = self.offers.get(replica.market, self.demand)
        if replica.state is ReplicaState.ENDING:
            return ReplicaSeen(phase=JobPhase.STOPPED)
        if offer.purchase is Purchase.ON_DEMAND or offer.zone in self.up:
            return ReplicaSeen(phase=JobPhase.RUNNING, answers=True, offer=offer)
        if replica.running_at is None:
            return ReplicaSeen(phase=JobPhase.QUEUED, tried=True, loss=ReplicaLoss.REFUSED)
        return ReplicaSeen(phase=JobPhase.FAILED, tried=True, offer=offer, loss=ReplicaLoss.LOST)

    def run(self, seconds: int) -> "World":
        for _ in range(seconds // 5):
            self.now += timedelta(seconds=5)
            at_s = (self.now - NOW).total_seconds()
            self.service = scale(self.service, None, ServiceTraffic(at_s=at_s), self.now)
            seen = {each.id: self.look(each) for each in self.service.open}
            step = decide_service(ServiceSnapshot(service=self.service, seen=seen), self.now)
            self.service = step.service
            for market in step.orders:
                self.number += 1
                self.service = order_replica(
                    self.service, f"r{self.number}", 80, self.now, market, 1
                )
        return self

    def serving(self) -> dict[str, int]:
        """The number of serving replicas in each region on spot, and on demand."""
        found = {"eu-west-1": 0, "us-east-1": 0, ON_DEMAND: 0}
        for each in list_serving(self.service):
            offer = self.offers.get(each.market)
            found[ON_DEMAND if offer is None else offer.region] += 1
        return found


@pytest.mark.parametrize(
    ("spec", "needs", "allowed"),
    [
        ({}, ResourceSpec(), {"eu-west-1", "us-east-1", "mars"}),
        ({"residency": "eu"}, ResourceSpec(), {"eu-west-1"}),
        ({"residency": "eu", "regions": ("eu-west-1",)}, ResourceSpec(), {"eu-west-1"}),
        ({"residency": "us"}, ResourceSpec(any_of=(ResourceSpec(), ResourceSpec())), {"us-east-1"}),
    ],
)
def test_replicas_are_placed_only_where_the_service_may_be(
    spec: dict[str, object], needs: ResourceSpec, allowed: set[str]
) -> None:
    offers = [World.make_offer(zone, Purchase.ON_DEMAND) for zone in ("eu-west-1a", "us-east-1a")]
    offers.append(replace(offers[0], region="mars", zone=None))  # its location is unknown
    snapshot = MarketSnapshot(market=OfferedMarket(offers=offers), as_of=NOW)
    task = replace(TASK, resources=needs, service=replace(SPEC, **spec))
    job = make_job_record(NOW, task=make_replica_task(task, "chat-1", 80), consented=True)
    found = [list_usable(wish, snapshot, lambda task, provider: ()) for wish in jobs_of(job)]
    assert {offer.region for usable in found for offer in usable} == allowed
    assert all({offer.region for offer in usable} == allowed for usable in found)


def test_a_lost_region_moves_replicas_to_the_other_one_and_lost_spot_to_on_demand() -> None:
    world = World().run(300)
    before = world.serving()
    assert before["eu-west-1"] > 0
    assert before["us-east-1"] > 0
    assert before["eu-west-1"] + before["us-east-1"] >= 3

    world.up = {zone for zone in ZONES if zone.startswith("us")}
    moved = world.run(300).serving()
    assert moved["eu-west-1"] == 0
    assert moved["us-east-1"] > before["us-east-1"]
    assert moved["us-east-1"] + moved[ON_DEMAND] >= 3, "nothing is missing"

    world.up = set()
    demand = world.run(300).serving()
    assert (demand["eu-west-1"], demand["us-east-1"]) == (0, 0)
    assert demand[ON_DEMAND] >= 3, "on demand replaces spot that is not granted"

    world.up = set(ZONES)
    again = world.run(3600).serving()
    assert again["eu-west-1"] + again["us-east-1"] >= 3
    assert again[ON_DEMAND] == 0, "spot is used again"

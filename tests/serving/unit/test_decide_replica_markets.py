"""The markets of a service's replicas: what is ordered where, what a lost market means, and which
regions are allowed.
"""

import asyncio
from datetime import timedelta
from typing import cast

import pytest
from tests.records import make_attempt_record
from tests.serving.unit.test_decide_service import (
    NOW,
    RUNS,
    SPEC,
    TASK,
    decide,
    make,
    states,
    traffic,
)

from cavvy.capabilities.serving.control.reconciler import ServiceMarkets
from cavvy.capabilities.serving.decide.replica_markets import (
    ON_DEMAND,
    find_loss,
    list_markets,
    market_of,
    merge_markets,
    narrow,
)
from cavvy.capabilities.serving.decide.service import ReplicaSeen
from cavvy.capabilities.serving.decide.traffic import observe, scale
from cavvy.capabilities.serving.replicas import ReplicaLoss
from cavvy.capabilities.serving.stored_services import StoredService
from cavvy.control.decide.task_places import place_in_regions
from cavvy.control.provider_pool import ProviderPool
from cavvy.domain.jobs import AttemptOutcome, JobPhase
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.tasks import Objection, ResourceSpec, SpotPolicy, TaskSpec
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import replace
from cavvy.spec.support import object_to_service

A, B = "aws/us-east-1a/spot", "aws/us-east-1b/spot"


def offer(zone: str, purchase: Purchase, micros: int) -> Offer:
    return Offer(
        provider="aws",
        region="us-east-1",
        zone=zone,
        instance_type="m",
        purchase=purchase,
        rate=HourlyRate(micros),
    )


OFFERS = [
    offer("us-east-1b", Purchase.SPOT, 4),
    offer("us-east-1a", Purchase.SPOT, 5),
    offer("us-east-1a", Purchase.SPOT, 3),
    offer("us-east-1a", Purchase.ON_DEMAND, 10),
    offer("us-east-1b", Purchase.ON_DEMAND, 11),
]


def spot_service(*states: str, **more: object) -> StoredService:
    """A service with the markets ON_DEMAND, A and B; `ready@A` is a replica in market A."""
    service = make(*(state.partition("@")[0] for state in states), **more)
    names = {"A": A, "B": B, "D": ON_DEMAND}
    replicas = tuple(
        replace(each, market=names[state.partition("@")[2]])
        for each, state in zip(service.replicas, states, strict=True)
    )
    task = replace(TASK, resources=ResourceSpec(spot=SpotPolicy.AUTO))
    return replace(service, task=task, replicas=replicas, markets=list_markets(OFFERS))


def test_spot_zones_are_markets_of_their_own_and_on_demand_is_one() -> None:
    found = [(each.name, each.rate.micros_per_hour, each.spot) for each in list_markets(OFFERS)]
    assert found == [(ON_DEMAND, 10, False), (A, 3, True), (B, 4, True)]
    [demand, spot, _] = list_markets(OFFERS)
    task = replace(TASK, resources=ResourceSpec(spot=SpotPolicy.AUTO))
    needs = narrow(task, spot).resources
    assert (needs.spot, needs.providers, needs.regions) == (
        SpotPolicy.ONLY,
        ("aws",),
        ("us-east-1a",),
    )
    assert narrow(task, demand).resources == replace(
        needs, spot=SpotPolicy.NEVER, providers=(), regions=()
    )
    kept = merge_markets(spot_service("ready@B"), list_markets(OFFERS[1:4]))
    assert [each.name for each in kept.markets] == [ON_DEMAND, A, B], "one runs in B"
    assert len(merge_markets(spot_service(), list_markets(OFFERS[1:4])).markets) == 2


def test_a_new_revision_leaves_the_markets_of_the_older_one() -> None:
    service = replace(spot_service("ready@B"), placement={B: 1})
    newer = replace(service, revision=2)
    kept = merge_markets(newer, list_markets(OFFERS[1:4]))
    assert [each.name for each in kept.markets] == [ON_DEMAND, A], "it may forbid B"
    markets = ServiceMarkets(cast(ProviderPool, None))  # no offers are asked for
    plain = asyncio.run(markets.update(replace(newer, task=TASK), NOW))
    assert (plain.markets, plain.placement) == ((), {})
    step = decide(replace(plain, target=2), RUNS)
    assert step.orders == ("", ""), "the planner places them, as the task permits"


def test_each_market_gets_as_many_as_it_should() -> None:
    service = spot_service("ready@A", placement={A: 1, B: 1, ON_DEMAND: 1}, target=2)
    assert decide(service).orders == (B, ON_DEMAND)
    again = decide(
        spot_service("draining@A", placement={A: 1}, target=1), replace(RUNS, in_flight=1)
    )
    assert (states(again), again.orders) == (["ready"], ())


def test_a_replica_in_the_wrong_market_serves_until_there_are_enough_without_it() -> None:
    early = decide(spot_service("ready@D", "starting@A", placement={A: 1}, target=1), RUNS_NOT)
    assert [str(each.state) for each in early.service.replicas] == ["ready", "starting"]
    later = decide(spot_service("ready@D", "ready@A", placement={A: 1}, target=1))
    assert [str(each.state) for each in later.service.replicas] == ["draining", "ready"]
    assert later.orders == ()


RUNS_NOT = ReplicaSeen(phase=JobPhase.RUNNING)


def test_a_notice_drains_the_replica_and_orders_another_at_once() -> None:
    service = spot_service("ready@A", placement={A: 1}, target=1)
    step = decide(service, replace(RUNS, reclaimed=True, in_flight=1))
    [replica, *_] = step.service.replicas
    assert (str(replica.state), replica.loss) == ("draining", ReplicaLoss.LOST)
    assert step.orders == (A,), "the policy has not chosen another market yet"
    again = decide(step.service, replace(RUNS, reclaimed=True, in_flight=1), after_s=11)
    assert states(again) == ["draining"], "it is not needed again: its node goes"
    done = decide(step.service, replace(RUNS, reclaimed=True), after_s=11)
    assert states(done) == ["ending"]


def test_a_market_without_capacity_is_left_and_pauses() -> None:
    waits = ReplicaSeen(phase=JobPhase.QUEUED, reason="no capacity", tried=True)
    service = spot_service("starting@A", placement={A: 1}, target=1)
    step = decide(service, waits)
    assert (states(step), step.orders) == (["ending"], ())
    ended = decide(step.service, ReplicaSeen(phase=JobPhase.STOPPED))
    assert (ended.orders, ended.service.failures) == ((), 0), "the program has not failed"
    after = timedelta(seconds=31).total_seconds() + 10
    assert decide(ended.service, after_s=after).orders == (A,)
    demand = spot_service("starting@D", placement={ON_DEMAND: 1}, target=1)
    assert states(decide(demand, waits)) == ["starting"], "on demand it waits as every job"
    early = replace(waits, tried=False)
    assert states(decide(service, early, after_s=30)) == ["starting"]
    assert states(decide(service, early, after_s=31)) == ["ending"]


@pytest.mark.parametrize(
    ("purchase", "outcome", "loss"),
    [
        (Purchase.SPOT, AttemptOutcome.PREEMPTED, ReplicaLoss.LOST),
        (Purchase.SPOT, AttemptOutcome.CAPACITY, ReplicaLoss.REFUSED),
        (Purchase.SPOT, AttemptOutcome.EXIT, None),
        (Purchase.ON_DEMAND, AttemptOutcome.PREEMPTED, None),
    ],
)
def test_a_loss_is_what_a_spot_market_did(
    purchase: Purchase, outcome: AttemptOutcome, loss: ReplicaLoss | None
) -> None:
    attempt = make_attempt_record(
        NOW, offer("us-east-1a", purchase, 1), id="r1-1", job_id="r1", outcome=outcome
    )
    assert find_loss(attempt) is loss


def test_the_autoscaler_places_replicas_on_spot_and_falls_back_to_on_demand() -> None:
    service = scale(spot_service(), None, traffic(0.2, arrivals=1, backlog=1), NOW)
    assert service.target == 1
    assert service.placement.get(ON_DEMAND, 0) <= 1
    assert service.placement.get(A, 0) + service.placement.get(B, 0) >= 1
    lost = spot_service("ended@A", "ready@B", placement={A: 1, B: 1}, target=1)
    first, *rest = lost.replicas
    lost = replace(lost, replicas=(replace(first, loss=ReplicaLoss.LOST), *rest))
    seen = observe(lost, None, traffic(1), NOW)
    assert [(each.name, each.lost) for each in seen.markets] == [(ON_DEMAND, 0), (A, 1), (B, 0)]
    told = scale(lost, None, traffic(1), NOW)
    again = observe(told, None, traffic(1), NOW).markets
    assert [market.lost for market in again] == [0, 0, 0], "a loss is told once"
    fewer = scale(replace(told, markets=told.markets[:2]), None, traffic(2), NOW)
    assert set(fewer.placement) <= {ON_DEMAND, A}, "the policy's record goes on without B"


def test_regions_and_residency_restrict_the_offers() -> None:
    def place(**more: object) -> tuple[str, ...]:
        task = replace(TASK, service=replace(SPEC, **more))
        return place_in_regions(task).resources.regions

    assert place() == ()
    assert place(regions=("eu-west-1", "us-east-1")) == ("eu-west-1", "us-east-1")
    assert place(residency="eu") == ("eu",)
    assert place(residency="eu", regions=("eu-west-1",)) == ("eu-west-1",)


def test_regions_and_residency_that_contradict_each_other_are_refused() -> None:
    def object_to(task: TaskSpec, **more: object) -> Objection | None:
        return object_to_service(replace(task, service=replace(SPEC, **more)))

    assert "us-east-1" in str(object_to(TASK, residency="eu", regions=("eu-west-1", "us-east-1")))
    assert object_to(TASK, residency="eu", regions=("eu-west-1",)) is None
    named = replace(TASK, resources=ResourceSpec(regions=("us-east-1",)))
    assert object_to(named, residency="us") is None
    assert object_to(named, residency="eu") is not None
    assert object_to(named, regions=("us",)) is not None


@pytest.mark.parametrize(
    ("ordered", "place", "market"),
    [("", A, A), ("", "aws/us-east-1a", ON_DEMAND), (B, A, B), (ON_DEMAND, A, ON_DEMAND)],
)
def test_a_replica_belongs_to_the_market_of_its_order_or_of_its_place(
    ordered: str, place: str, market: str
) -> None:
    (replica,) = make("ready").replicas
    assert market_of(replace(replica, market=ordered, place=place)) == market

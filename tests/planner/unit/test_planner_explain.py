"""Every rejected offer is accounted for, and one sentence says what would have to change."""

from datetime import UTC, datetime, timedelta

import pytest

from cavvy.catalog.fit import Constraint, NearMiss, OfferMatches, match_offers
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.tasks import (
    AcceleratorNeed,
    JobLimits,
    ResourceSpec,
    SpotPolicy,
    TaskSpec,
    Workload,
)
from cavvy.domain.units import HourlyRate, Money
from cavvy.domain.values import replace
from cavvy.planner.explain import FIELDS, Rejection, explain, say_no_offer, wish
from cavvy.planner.placements import PlacementPlan
from cavvy.planner.rank import plan

NOW = datetime(2026, 1, 1, tzinfo=UTC)
EMPTY = PlacementPlan(placements=(), considered=0, kept=0)


def make_offer(
    usd: float = 19.92, region: str = "eu-west-1", purchase: Purchase = Purchase.ON_DEMAND
) -> Offer:
    return Offer(
        provider="cloud",
        region=region,
        instance_type="big",
        accelerator="H100",
        accelerator_count=8,
        accelerator_memory_mib=81920,
        vcpus=8,
        rate=HourlyRate(round(usd * 1e6)),
        purchase=purchase,
    )


def make_task(limits: JobLimits | None = None, usd: float = 15) -> TaskSpec:
    need = ResourceSpec(
        accelerators=(AcceleratorNeed(name="H100", count_min=8),),
        regions=("eu",),
        max_rate=HourlyRate(round(usd * 1e6)),
    )
    work = Workload(samples=3600.0, rates={"H100": 1.0})
    return TaskSpec(name="t", run="true", resources=need, limits=limits or JobLimits(), work=work)


def make_matches(*misses: NearMiss, rejected: dict[Constraint, int] | None = None) -> OfferMatches:
    counts = rejected if rejected is not None else {miss.constraint: 1 for miss in misses}
    return OfferMatches(
        offers=(), matched=0, total=sum(counts.values()), rejected=counts, misses=misses
    )


def test_the_price_limit_is_said_with_the_cheapest_and_what_to_write() -> None:
    dear = NearMiss(offer=make_offer(30), constraint=Constraint.PRICE, text="costs $30.00/h")
    less = NearMiss(offer=make_offer(19.911), constraint=Constraint.PRICE, text="costs $19.92/h")
    elsewhere = NearMiss(offer=make_offer(1, "us"), constraint=Constraint.REGION, text="is in us")
    found = explain(
        [make_matches(elsewhere, dear, less, rejected={Constraint.REGION: 1, Constraint.PRICE: 2})],
        EMPTY,
    )
    assert say_no_offer(make_task(), found) == (
        "No offer: the cheapest H100:8 in eu is $19.91/h, but your limit is $15.00/h; raise "
        "resources.max_price to $19.92"
    )


def test_the_nearest_offer_of_several_catalogs_is_said() -> None:
    need = ResourceSpec(memory_min_mib=40 << 20)
    small, large = (
        replace(make_offer(), instance_type=name, memory_mib=mib)
        for name, mib in (("small", 24 << 10), ("large", 32 << 20))
    )
    found = explain([match_offers([small], need), match_offers([large], need)], EMPTY)
    assert [miss.offer.instance_type for miss in found.misses] == ["large", "small"]
    assert "the nearest match, large at cloud" in say_no_offer(
        TaskSpec(name="t", run="true", resources=need), found
    )


def test_another_constraint_is_said_with_the_nearest_offer() -> None:
    miss = NearMiss(
        offer=make_offer(10, "us-east-1"),
        constraint=Constraint.REGION,
        text="is in us-east-1, not in eu",
    )
    assert say_no_offer(make_task(), explain([make_matches(miss)], EMPTY)) == (
        "No offer: the nearest match, big at cloud (us-east-1) for $10.00/h, is in us-east-1, not in "
        "eu; allow us-east-1 in resources.regions"
    )


def test_a_limit_is_nearer_than_any_constraint() -> None:
    task = make_task(JobLimits(budget=Money(5_000_000)))
    matches = make_matches(NearMiss(offer=make_offer(), constraint=Constraint.PRICE, text="costs"))
    found = explain([matches], plan(task, [make_offer(12)], now=NOW))
    assert say_no_offer(task, found) == (
        "No offer: the nearest match, big at cloud (eu-west-1) for $12.00/h, would cost $12.40, but "
        "your budget leaves $5.00; raise limits.budget by $7.40"
    )


def test_a_slow_offer_is_said_with_the_time_that_is_missing() -> None:
    task = make_task(JobLimits(duration=timedelta(minutes=30)))
    found = explain([make_matches()], plan(task, [make_offer(12)], now=NOW))
    (miss,) = found.misses
    assert (miss.reason, miss.change) == ("duration", "raise limits.duration by 30m00s")
    assert found.rejections == (Rejection(reason="duration", count=1, field="limits.duration"),)


def test_nothing_to_choose_from_is_said() -> None:
    assert "`cavvy setup PROVIDER`" in say_no_offer(make_task(), explain([], EMPTY))


def test_where_no_single_change_helps_the_first_one_is_named() -> None:
    rejected = {Constraint.ACCELERATOR: 900, Constraint.COUNT: 99, Constraint.REGION: 1}
    assert say_no_offer(make_task(), explain([make_matches(rejected=rejected)], EMPTY)) == (
        "No offer: each of 1,000 offers misses several of the task's requirements; 900 of "
        "them fail the requirement for accelerator (resources.gpu), and the offers that meet most "
        "requirements fail the requirement for region: change resources.regions first"
    )


def test_what_a_provider_refuses_is_nearer_than_a_constraint() -> None:
    near = make_matches(NearMiss(offer=make_offer(), constraint=Constraint.PRICE, text="costs"))
    refused = Rejection(
        reason="local: it has no choice of disks", count=1, field="resources.disk.type"
    )
    assert say_no_offer(make_task(), explain([near], EMPTY, refused=[refused])) == (
        "No offer: some offers fit, but are refused by local: it has no choice of disks; change "
        "resources.disk.type"
    )


def test_where_all_fail_at_one_thing_it_is_named() -> None:
    found = explain([make_matches(rejected={Constraint.INSTANCE: 7})], EMPTY)
    assert (
        say_no_offer(make_task(), found)
        == "No offer: all 7 offers fail the requirement for instance type; change resources.instance"
    )
    only = explain([make_matches(rejected={Constraint.ACCELERATOR: 1})], EMPTY)
    assert say_no_offer(make_task(), only) == (
        "No offer: the only offer fails the requirement for accelerator; change resources.gpu"
    )


def test_every_offer_is_accounted_for_over_several_catalogs() -> None:
    task = make_task(JobLimits(budget=Money(5_000_000)))
    fitting = [make_offer(12), make_offer(1, "eu-2")]
    first = OfferMatches(
        offers=fitting, matched=2, total=7, rejected={Constraint.PRICE: 2, Constraint.COUNT: 3}
    )
    second = make_matches(rejected={Constraint.COUNT: 4})
    refused = Rejection(reason="cloud refuses it", count=1, field="image")
    third = OfferMatches(offers=[make_offer()], matched=1, total=1)
    found = explain([first, second, third], plan(task, fitting, now=NOW), refused=[refused])
    assert [(rejection.reason, rejection.count) for rejection in found.rejections] == [
        ("accelerator count", 7),
        ("price", 2),
        ("cloud refuses it", 1),
        ("budget", 1),
    ]
    assert (
        found.considered
        == found.kept + sum(rejection.count for rejection in found.rejections)
        == 12
    )


def test_the_five_nearest_are_taken_in_turn_from_each_catalog() -> None:
    near = [
        NearMiss(offer=make_offer(n), constraint=Constraint.PRICE, text=str(n))
        for n in range(20, 30)
    ]
    found = explain([make_matches(*near[:8]), make_matches(*near[8:])], EMPTY)
    assert [miss.text for miss in found.misses] == ["20", "28", "21", "29", "22"]


@pytest.mark.parametrize("constraint", Constraint)
def test_every_constraint_names_its_field_and_what_to_change(constraint: Constraint) -> None:
    miss = NearMiss(offer=make_offer(purchase=Purchase.SPOT), constraint=constraint, text="no")
    (said,) = explain([make_matches(miss)], EMPTY).misses
    assert FIELDS[constraint] in said.change


@pytest.mark.parametrize(
    ("need", "text"),
    [
        (ResourceSpec(), "node"),
        (ResourceSpec(cpus_min=8, memory_min_mib=65536), "node with 8 CPUs and 64 GiB"),
        (ResourceSpec(instance="p5.48xlarge", providers=("aws",)), "p5.48xlarge at aws"),
        (
            ResourceSpec(
                accelerators=(AcceleratorNeed(name="A100"),),
                spot=SpotPolicy.ONLY,
                regions=("eu", "us"),
            ),
            "A100:1 on spot in eu or us",
        ),
    ],
)
def test_the_wish_in_words(need: ResourceSpec, text: str) -> None:
    assert wish(need) == text


@pytest.mark.parametrize("constraint", [Constraint.CPUS, Constraint.MEMORY, Constraint.NETWORK])
def test_a_fact_that_an_offer_does_not_state_cannot_be_accepted_only_left_unasked(
    constraint: Constraint,
) -> None:
    silent = replace(make_offer(), vcpus=0, memory_mib=0, network_mbps=None)
    miss = NearMiss(offer=silent, constraint=constraint, text="does not state it")
    (said,) = explain([make_matches(miss)], EMPTY).misses
    assert said.change == f"leave out {FIELDS[constraint]}"

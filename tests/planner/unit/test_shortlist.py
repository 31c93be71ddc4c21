"""The plan of the short list equals the plan of all offers, and reads few of them."""

from collections.abc import Iterator, Sequence
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cavvy.catalog.fit import OfferLot
from cavvy.catalog.needs import parse_accelerator
from cavvy.cli.task.problems import fits_one
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.tasks import (
    CheckpointPolicy,
    JobLimits,
    ResourceSpec,
    SpotPolicy,
    TaskSpec,
    Transfer,
    Workload,
)
from cavvy.domain.units import HourlyRate, Money
from cavvy.domain.values import replace
from cavvy.planner.placements import Objective, PlanCounts, PlanningContext, RankingView
from cavvy.planner.rank import plan
from cavvy.planner.shortlist import shorten
from cavvy.planner.transfers import group_places
from cavvy.store.snapshot import CatalogSnapshot
from cavvy.store.snapshot.choose import SHIPPED
from cavvy.store.snapshot.refresh import write_snapshot

NOW = datetime(2026, 11, 20, 12, tzinfo=UTC)
USD = 1_000_000
RATES = [
    {"cpu": 40.0},
    {"cpu:2": 5.0, "cpu:8": 18.0},
    {"A100": 900.0, "H100:8": 15_000.0},
    {"cpu:4": 9.0, "aws/t4g.nano": 3.0, "gcp/e2-micro:2": 4.0},
    {"gpu": 300.0, "cpu": 20.0},
]


class Sample:
    """Every 12th machine type of the shipped snapshot with all its offers, some of which have the
    same price, and its snapshot."""

    def __init__(self, path: Path) -> None:
        with CatalogSnapshot.open(SHIPPED) as shipped:
            every = list(shipped.all_offers())
            self.egress = shipped.egress()
        names = sorted({(each.provider, each.instance_type) for each in every})
        some = set(names[::12])
        self.offers = [each for each in every if (each.provider, each.instance_type) in some]
        write_snapshot(path, self.offers, as_of=date(2026, 11, 20))
        self.snapshot = CatalogSnapshot.open(path)


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sample]:
    made = Sample(tmp_path_factory.mktemp("catalog") / "sample.db")
    yield made
    made.snapshot.close()


@st.composite
def works(draw: st.DrawFn) -> Workload | None:
    match draw(st.integers(0, 4)):
        case 0 | 1:
            return None
        case 2:
            return Workload(samples=draw(st.sampled_from([1e4, 1e8])), rates=draw(_RATES))
        case 3:
            return Workload(flops=draw(st.sampled_from([1e16, 1e20])), precision="bf16")
        case _:
            measured = draw(st.sampled_from([None, "A100:8", "cpu:4"]))
            return Workload(duration=timedelta(hours=9), measured_on=measured)


_RATES = st.sampled_from(RATES)


@st.composite
def tasks(draw: st.DrawFn) -> TaskSpec:
    gpu = draw(st.none() | st.sampled_from(["gpu:1..", "A100:8", "24GB", "H100|A100:1..8"]))
    data = draw(st.none() | st.sampled_from(["s3://b/x", "gs://b/x", "hf://d/x"]))
    region = draw(st.none() | st.just("us-east-1"))
    results = draw(st.none() | st.sampled_from(["s3://b/y", "gs://b/y"]))
    budget = draw(st.none() | st.sampled_from([2_000, USD // 5, 3 * USD, 60 * USD]))
    return TaskSpec(
        name="x",
        run="x",
        nodes=draw(st.sampled_from([1, 1, 3])),
        resources=ResourceSpec(
            accelerators=parse_accelerator(gpu) if gpu else (),
            cpus_min=draw(st.none() | st.sampled_from([2, 30])),
            spot=draw(st.sampled_from(SpotPolicy)),
            regions=draw(st.sampled_from([(), (), ("eu",), ("us-east-1", "uk")])),
            providers=draw(st.sampled_from([(), (), ("aws",), ("gcp", "azure")])),
            max_rate=draw(st.none() | st.sampled_from([HourlyRate(90_000), HourlyRate(4 * USD)])),
        ),
        work=draw(works()),
        checkpoint=draw(st.none() | st.just(CheckpointPolicy(path="c"))),
        limits=JobLimits(
            budget=None if budget is None else Money(budget),
            duration=draw(st.none() | st.sampled_from([timedelta(hours=2), timedelta(days=9)])),
            deadline_after=draw(st.none() | st.sampled_from([timedelta(0), timedelta(days=1)])),
        ),
        inputs=(Transfer(source=data, target="i", size_mib=900_000, region=region),)
        if data
        else (),
        outputs=(Transfer(source="o", target=results, size_mib=70_000),) if results else (),
    )


def read_short(
    sample: Sample,
    task: TaskSpec,
    situation: PlanningContext,
    by: Objective,
    view: RankingView,
    skip: set[tuple[str, str]],
) -> tuple[Sequence[Offer], PlanCounts]:
    group = group_places(task, sample.egress, sends=situation.output_mib is not None)
    found = sample.snapshot.match_lots(task.resources, skip=skip, group=group)
    lots, others = shorten(task, found.lots, now=NOW, by=by, situation=situation, view=view)
    return sample.snapshot.read_lots(found, lots), others


MACHINES = [
    ("aws", "a", 2, 100),
    ("aws", "b", 2, None),
    ("gcp", "a", 4, 100),
    ("gcp", "c", 4, 5_000),
    ("x", "c", 2, 5_000),
]
PLACES = {"aws": ("us-east-1", "r1"), "gcp": ("us-central1", "r2"), "x": ("r3", "r4")}


CHOICES = [
    Offer(
        provider=provider,
        region=region,
        zone=zone,
        instance_type=name,
        vcpus=cpus,
        network_mbps=network,
        purchase=purchase,
        rate=HourlyRate(rate),
    )
    for provider, name, cpus, network in MACHINES
    for region in PLACES[provider]
    for zone in ("a", "b")
    for purchase in (Purchase.ON_DEMAND, Purchase.SPOT)
    for rate in (0, USD, 2 * USD)
]


def few_offers() -> st.SearchStrategy[list[Offer]]:
    """Offers with few different prices, so that many are equally good."""
    chosen = st.lists(st.sampled_from(CHOICES), max_size=14, unique_by=lambda each: each.key)
    return chosen.map(lambda each: sorted(each, key=lambda offer: offer.rate))


def make_lots(task: TaskSpec, offers: list[Offer], egress: dict[str, Money]) -> list[OfferLot]:
    """Group offers as `CatalogSnapshot.match_lots` does."""
    place = group_places(task, egress, sends=False) or (lambda provider, region: ())
    parts: dict[object, int] = {}
    groups: dict[tuple[int, str, int], list[Offer]] = {}
    for each in offers:
        part = parts.setdefault(place(each.provider, each.region), len(parts))
        number = [(x[0], x[1]) for x in MACHINES].index((each.provider, each.instance_type))
        groups.setdefault((number, each.purchase, part), []).append(each)
    lots = []
    for (number, _, part), members in groups.items():
        rates = [each.rate.micros_per_hour for each in members]
        sample = min(members, key=lambda each: each.rate)
        lots.append(
            OfferLot(number=number, part=part, sample=sample, most=max(rates), count=len(rates))
        )
    return lots


@settings(max_examples=200, deadline=None)
@given(
    task=tasks(),
    offers=few_offers(),
    by=st.sampled_from(Objective),
    limit=st.integers(1, 6),
    distinct=st.booleans(),
)
def test_offers_that_are_equally_good_are_all_ranked(
    task: TaskSpec, offers: list[Offer], by: Objective, limit: int, distinct: bool
) -> None:
    situation = PlanningContext(egress={"aws": Money(90_000), "gcp/r2": Money(10_000)})
    view = RankingView(limit=limit, distinct=distinct)
    lots = make_lots(task, offers, dict(situation.egress))
    chosen, others = shorten(task, lots, now=NOW, by=by, situation=situation, view=view)
    few = [each for lot in chosen for each in offers if is_of(each, lot, task, situation)]
    expected = plan(task, offers, now=NOW, by=by, situation=situation, view=view)
    found = plan(task, few, now=NOW, by=by, situation=situation, view=view, others=others)
    assert found == expected


def is_of(offer: Offer, lot: OfferLot, task: TaskSpec, situation: PlanningContext) -> bool:
    place = group_places(task, situation.egress, sends=False) or (lambda provider, region: ())
    same = ("provider", "instance_type", "purchase")
    return all(getattr(offer, each) == getattr(lot.sample, each) for each in same) and place(
        offer.provider, offer.region
    ) == place(lot.sample.provider, lot.sample.region)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    task=tasks(),
    by=st.sampled_from(Objective),
    limit=st.sampled_from([1, 3, 10, 40]),
    distinct=st.booleans(),
    output_mib=st.none() | st.just(200_000),
    skip=st.sampled_from([set(), {("aws", "us-east-1"), ("gcp", "us-central1")}]),
)
def test_the_plan_of_the_short_list_is_the_plan_of_all_offers(
    sample: Sample,
    task: TaskSpec,
    by: Objective,
    limit: int,
    distinct: bool,
    output_mib: int | None,
    skip: set[tuple[str, str]],
) -> None:
    situation = PlanningContext(output_mib=output_mib, egress=sample.egress)
    view = RankingView(limit=limit, distinct=distinct)
    fitting = sample.snapshot.match(task.resources).offers
    every = [each for each in fitting if (each.provider, each.region) not in skip]
    few, others = read_short(sample, task, situation, by, view, skip)
    expected = plan(task, every, now=NOW, by=by, situation=situation, view=view)
    found = plan(task, few, now=NOW, by=by, situation=situation, view=view, others=others)
    assert found == expected
    assert found.considered == len(every)
    first = plan(task, fitting, now=NOW, view=RankingView(limit=1))
    assert fits_one(sample.snapshot, task, NOW) == bool(first.placements)


def test_skipped_regions_are_not_counted(sample: Sample) -> None:
    need = ResourceSpec()
    skip = {("aws", "us-east-1")}
    every, fewer = sample.snapshot.match(need), sample.snapshot.match_lots(need, skip=skip)
    gone = [each for each in every.offers if (each.provider, each.region) in skip]
    assert gone
    assert fewer.found.matched == every.matched - len(gone) == sum(x.count for x in fewer.lots)
    assert fewer.found.total == every.total - len(gone)
    assert fewer.found.rejected == every.rejected
    assert fewer.found.misses == every.misses


def test_a_plan_of_any_machine_reads_few_of_the_offers() -> None:
    task = TaskSpec(name="x", run="x", work=Workload(samples=1e6, rates={"cpu:2": 5.0}))
    view, here = RankingView(limit=10, distinct=True), PlanningContext()
    with CatalogSnapshot.open(SHIPPED) as shipped:
        found = shipped.match_lots(task.resources)
        lots, others = shorten(
            task, found.lots, now=NOW, by=Objective.COST, situation=here, view=view
        )
        read = shipped.read_lots(found, lots)
    assert found.found.matched > 50_000
    assert len(read) < 2_000
    assert len(read) + others.kept == found.found.matched
    assert all(each.purchase is Purchase.ON_DEMAND for each in read)


def test_a_lot_with_offers_on_both_sides_of_the_budget_is_read() -> None:
    known = {each.key: each for each in CHOICES if each.provider == "aws"}
    cheap = replace(known["aws/us-east-1/a/a:0/on-demand"], rate=HourlyRate(USD // 2))
    near = replace(known["aws/us-east-1/a/b:0/on-demand"], rate=HourlyRate(USD))
    far = replace(known["aws/us-east-1/b/b:0/on-demand"], rate=HourlyRate(3 * USD))
    task = TaskSpec(
        name="x",
        run="x",
        work=Workload(duration=timedelta(hours=1)),
        limits=JobLimits(budget=Money(3 * USD // 2)),
    )
    lots = make_lots(task, [cheap, near, far], {})
    view, here = RankingView(limit=1), PlanningContext()
    chosen, others = shorten(task, lots, now=NOW, by=Objective.COST, situation=here, view=view)
    assert {each.sample.instance_type for each in chosen} == {"a", "b"}
    assert others == PlanCounts()

"""Markets as they are known, courses as policies see them, and forecasts on jobs with deadlines."""

from datetime import UTC, datetime, timedelta

import pytest
from tests.records import FIXED, SPOT

from cavvy.domain import tasks
from cavvy.domain.elastic import NodeRange
from cavvy.domain.markets import MarketTally, Observation, ObservationKind
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.units import HourlyRate, Money
from cavvy.domain.values import replace
from cavvy.planner.deadline.forecast import Forecast, find_cheapest_in_time, foresee
from cavvy.planner.deadline.inputs import JobProgress, PolicyInputs, find_inputs
from cavvy.planner.deadline.recommendation import advise
from cavvy.planner.markets import MarketKnowledge, MarketRecord, cooldown_until, standings_of
from cavvy.planner.spot.view import RunMode
from cavvy.planner.work import MACHINE_START

NOW = datetime(2030, 1, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)
OFFERS = (SPOT, FIXED)


def task(hours: float = 10, **changes: object) -> tasks.TaskSpec:
    made = tasks.TaskSpec(
        name="digits",
        run="train",
        resources=tasks.ResourceSpec(spot=tasks.SpotPolicy.AUTO),
        checkpoint=tasks.CheckpointPolicy(path="c", every=timedelta(minutes=10)),
        limits=tasks.JobLimits(deadline_after=2 * hours * HOUR),
        work=tasks.Workload(samples=hours * 3600, rates={"cpu": 1.0}),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def at(hours: float = 20, **changes: object) -> JobProgress:
    return replace(JobProgress(submitted_at=NOW, deadline=NOW + hours * HOUR), **changes)  # type: ignore[arg-type]


def inputs(
    job: tasks.TaskSpec, progress: JobProgress, offers: tuple[Offer, ...] = OFFERS
) -> PolicyInputs:
    found = find_inputs(job, offers, MarketKnowledge(), progress)
    assert found is not None
    return found


def seen(kind: ObservationKind, minute: float) -> Observation:
    return Observation(market=SPOT.key, kind=kind, at=NOW + timedelta(minutes=minute))


def test_records_are_mixed_with_a_prior_that_evidence_outweighs() -> None:
    unknown = MarketRecord(market="m")
    assert unknown.preemptions_per_hour == pytest.approx(0.2)
    assert unknown.expect_boot() == MACHINE_START
    assert unknown.expect_boot(timedelta(minutes=10)) == timedelta(minutes=10)
    booted = MarketRecord(market="m", boots=8, boot_s=8 * 300.0)
    assert booted.expect_boot(timedelta(minutes=10)) == timedelta(minutes=6)
    day = 24 * 3600.0
    tallies = [
        MarketTally(
            market="m",
            kind=ObservationKind.ENDED,
            count=10,
            seconds=day,
            node_seconds=50 * day,
            first_at=NOW,
            last_at=NOW,
        ),
        MarketTally(
            market="m",
            kind=ObservationKind.TAKEN,
            count=1,
            seconds=60,
            node_seconds=60,
            first_at=NOW,
            last_at=NOW,
        ),
        MarketTally(
            market="m",
            kind=ObservationKind.REFUSED,
            count=8,
            seconds=0,
            node_seconds=0,
            first_at=NOW,
            last_at=NOW,
        ),
    ]
    [(_, known)] = standings_of(tallies).items()
    assert known.preemptions_per_hour < 0.01
    assert (known.lives, known.taken, known.refused) == (11, 1, 8)


def test_a_market_rests_longer_with_each_refusal_in_a_row_and_a_grant_ends_it() -> None:
    no = [seen(ObservationKind.REFUSED, minute) for minute in (0, 1, 5)]
    assert cooldown_until(no[:1]) == NOW + timedelta(minutes=1)
    assert cooldown_until(no) == NOW + timedelta(minutes=5 + 4)
    assert cooldown_until([*no, seen(ObservationKind.GRANTED, 6)]) is None
    assert cooldown_until([*no, seen(ObservationKind.PRICE, 6)]) == NOW + timedelta(minutes=9)
    assert cooldown_until([seen(ObservationKind.REFUSED, 0)] * 40) == NOW + timedelta(minutes=10)


@pytest.mark.parametrize("checkpoint", [None, tasks.CheckpointPolicy(path="c", every=HOUR)])
def test_a_first_start_has_no_work_to_do_again(checkpoint: tasks.CheckpointPolicy | None) -> None:
    """On demand costs what the plan's table says of it: the work and one start."""
    job = task(checkpoint=checkpoint)
    made = inputs(job, at())
    never = foresee(made, MarketKnowledge(), at(), 0.0, "never")
    hours = 10 + made.start / HOUR
    assert (never.usd_mean, never.hours_p50) == (pytest.approx(hours * 1.0), pytest.approx(hours))
    assert made.start < timedelta(minutes=10)
    half = replace(at(), done=0.5)  # a gang that follows another continues from its checkpoint
    followed = foresee(made, MarketKnowledge(), half, 0.0, "never")
    assert followed.hours_p50 == pytest.approx(5 + made.start / HOUR)


def test_what_cannot_be_promised_has_no_setting() -> None:
    assert (
        find_inputs(
            task(resources=tasks.ResourceSpec(spot=tasks.SpotPolicy.NEVER)),
            OFFERS,
            MarketKnowledge(),
            at(),
        )
        is None
    )
    assert find_inputs(task(work=None), OFFERS, MarketKnowledge(), at()) is None
    assert find_inputs(task(), (SPOT,), MarketKnowledge(), at()) is None
    assert find_inputs(task(), (FIXED,), MarketKnowledge(), at()) is None
    assert find_inputs(task(), OFFERS, MarketKnowledge(), at(hours=9)) is None


def test_the_policy_takes_spot_with_slack_and_on_demand_without() -> None:
    loose, tight = at(), at(hours=10.3)
    assert advise(inputs(task(), loose), MarketKnowledge(), loose, NOW).offers == (SPOT,)
    answer = advise(inputs(task(), tight), MarketKnowledge(), tight, NOW)
    assert (answer.mode, answer.offers) == (RunMode.ON_DEMAND, (FIXED,))


def test_the_reason_names_a_market_that_took_back_launches_and_until_when_it_rests() -> None:
    progress = replace(at(), home=SPOT)
    took = [
        replace(seen(kind, minute), seconds=90.0 if kind is ObservationKind.TAKEN else 0.0)
        for began in (0, 3, 10)
        for minute, kind in (
            (began, ObservationKind.GRANTED),
            (began + 1.5, ObservationKind.TAKEN),
        )
    ]
    found = inputs(task(), progress)
    assert timedelta(seconds=90) < found.start
    knowledge = MarketKnowledge(recent={SPOT.key: took})
    answer = advise(found, knowledge, progress, NOW + timedelta(minutes=13))
    assert answer.mode is RunMode.IDLE
    assert answer.reason.endswith(
        "fake/r/a/m:0 took back 3 launches in a row before the work started "
        "and rests until 00:23 UTC"
    )
    later = advise(found, knowledge, progress, NOW + timedelta(minutes=25))
    assert (later.offers, later.reason) == ((SPOT,), "spot is available")


def test_a_gang_on_spot_that_saves_nothing_is_left_while_there_is_time_to_do_it_all_again() -> None:
    progress = at(hours=13.6, current=SPOT, works=True, done=0.3, unsaved=3 * HOUR)
    answer = advise(
        inputs(task(), progress), MarketKnowledge(), progress, NOW + timedelta(hours=3.5)
    )
    assert answer.mode is RunMode.ON_DEMAND
    saved = replace(progress, unsaved=timedelta(minutes=5))
    assert advise(inputs(task(), saved), MarketKnowledge(), saved, NOW + timedelta(hours=3.5)).stay


def test_a_budget_that_does_not_pay_for_on_demand_keeps_the_job_on_spot() -> None:
    poor = at(hours=10.3, budget_left=Money(5_000_000))
    answer = advise(inputs(task(), poor), MarketKnowledge(), poor, NOW)
    assert answer.mode is RunMode.SPOT
    assert "budget" in answer.reason


def test_a_faster_machine_counts_as_no_faster_but_cheaper() -> None:
    job = task(work=tasks.Workload(samples=36_000, rates={"cpu:8": 1.0, "cpu:16": 2.0}))
    fast = replace(FIXED, instance_type="f", vcpus=16, rate=HourlyRate(2_200_000))
    found = inputs(job, at(), (SPOT, FIXED, fast))
    by_name = {market.name: market.on_demand_usd_hr for market in found.terms.markets}
    assert by_name == {"fake/r/a/m:0": 1.0, "fake/r/a/f:0": pytest.approx(1.1)}


def away(offer: Offer, provider: str, micros: int) -> tuple[Offer, Offer]:
    """The same machines at another provider, spot at this price."""
    return (
        replace(offer, provider=provider, purchase=Purchase.SPOT, rate=HourlyRate(micros)),
        replace(offer, provider=provider),
    )


@pytest.mark.parametrize(
    ("price", "saved_gb", "storage", "goes"),
    [
        (0, 50, None, True),
        (1_000_000, 0, None, True),  # nothing is saved yet, so nothing has to go anywhere
        (1_000_000, 50, None, False),
        (1_000_000, 50, "gs://kept", True),  # from the bucket, which is where the job would go
        (1_000_000, 50, "s3://kept", False),
    ],
)
def test_a_move_is_made_for_a_lower_price_only_if_it_pays_for_the_bytes_that_leave(
    price: int, saved_gb: int, storage: str | None, goes: bool
) -> None:
    here, there = away(FIXED, "aws", 300_000), away(FIXED, "gcp", 100_000)
    job = task(
        checkpoint=tasks.CheckpointPolicy(path="c", every=timedelta(minutes=10), storage=storage)
    )
    progress = at(
        hours=40,
        current=here[0],
        works=True,
        saved_bytes=saved_gb * 10**9,
        egress={"aws": Money(price)},
        done=0.1,
    )
    found = inputs(job, progress, (*here, *there))
    recommendation = advise(found, MarketKnowledge(), progress, NOW + HOUR)
    assert (recommendation.mode, recommendation.stay) == (RunMode.SPOT, not goes)
    if goes:
        assert recommendation.offers[0] == there[0]


@pytest.mark.parametrize(("service", "goes"), [("gcp", False), ("sagemaker", True)])
def test_a_move_to_a_service_of_the_same_cloud_costs_no_egress(service: str, goes: bool) -> None:
    here, there = away(FIXED, "aws", 300_000), away(FIXED, service, 100_000)
    progress = at(
        hours=40,
        current=here[0],
        works=True,
        saved_bytes=50 * 10**9,
        egress={"aws": Money(1_000_000)},
        done=0.1,
    )
    found = inputs(task(), progress, (*here, *there))
    recommendation = advise(found, MarketKnowledge(), progress, NOW + HOUR)
    assert recommendation.stay == (not goes)


def test_the_last_resort_is_the_machine_that_is_cheapest_with_the_way_there() -> None:
    here, there = (
        away(FIXED, "aws", 300_000),
        away(replace(FIXED, rate=HourlyRate(900_000)), "gcp", 300_000),
    )
    for price, wanted in ((0, there[1]), (1_000_000, here[1])):
        progress = at(
            hours=10.35,
            current=here[0],
            starting_for=HOUR / 4,
            saved_bytes=50 * 10**9,
            egress={"aws": Money(price)},
        )
        found = inputs(task(), progress, (*here, *there))
        recommendation = advise(found, MarketKnowledge(), progress, NOW + timedelta(minutes=15))
        assert (recommendation.mode, recommendation.offers[0]) == (RunMode.ON_DEMAND, wanted)


def test_an_forecast_orders_the_choices_and_is_the_same_each_time() -> None:
    progress = at(hours=13)
    found = inputs(task(), progress)
    never, auto, only = (
        foresee(found, MarketKnowledge(), progress, 0.0, kind) for kind in ("never", "auto", "only")
    )
    assert never.in_time == auto.in_time == 1.0
    assert only.in_time < 0.9
    assert only.usd_mean < auto.usd_mean < never.usd_mean
    assert auto.usd_p10 < auto.usd_mean < auto.usd_p90
    assert foresee(found, MarketKnowledge(), progress, 0.0, "auto") == auto
    assert foresee(found, MarketKnowledge(), progress, 0.0, "auto", seed=2) != auto


@pytest.mark.parametrize(("late_h", "in_time"), [(0, 1.0), (5, 0.0)])
def test_a_run_that_finishes_after_the_deadline_is_not_in_time(late_h: int, in_time: float) -> None:
    found = inputs(task(), at(hours=13))
    seen = foresee(found, MarketKnowledge(), at(hours=13), late_h * 3600.0, "never")
    assert seen.in_time == in_time


def test_a_market_that_is_taken_back_all_the_time_has_a_worse_forecast() -> None:
    progress = at(hours=13)
    found = inputs(task(), progress)
    bad = [
        seen(status, -4000 + 20 * index)
        for index, status in enumerate([ObservationKind.GRANTED, ObservationKind.TAKEN] * 100)
    ]
    known = MarketKnowledge(recent={SPOT.key: bad})
    assert (
        foresee(found, known, progress, 0.0, "auto").usd_mean
        > foresee(found, MarketKnowledge(), progress, 0.0, "auto").usd_mean
    )


def test_more_nodes_of_an_elastic_job_take_less_of_the_time_stated_for_the_least() -> None:
    work = tasks.Workload(duration=10 * HOUR)
    wide = task(nodes=4, elastic=NodeRange(least=4, most=12), work=work)
    sizes = wide.elastic.list_samples() if wide.elastic else ()
    assert sizes == [4, 7, 12]
    ends = []
    for nodes in sizes:
        found = inputs(replace(wide, nodes=nodes), at())
        ends.append(foresee(found, MarketKnowledge(), at(), 0.0, "never"))
    assert [each.nodes for each in ends] == [4, 7, 12]
    start = ends[0].hours_p50 - 10
    assert [each.hours_p50 for each in ends] == pytest.approx(
        [10 + start, 10 * 4 / 7 + start, 10 / 3 + start], rel=1e-6
    )


def test_the_cheapest_way_that_is_in_time_is_found_among_sizes() -> None:
    def make(nodes: int, usd: float, in_time: float) -> Forecast:
        return Forecast(
            kind="auto",
            nodes=nodes,
            runs=100,
            usd_mean=usd,
            usd_p10=usd,
            usd_p90=usd,
            in_time=in_time,
            hours_p50=1.0,
            hours_p90=1.0,
        )

    ways = [make(4, 3.0, 1.0), make(12, 2.0, 0.95), make(16, 1.0, 0.9)]
    assert find_cheapest_in_time(ways) == ways[1]
    assert find_cheapest_in_time(ways[2:]) is None

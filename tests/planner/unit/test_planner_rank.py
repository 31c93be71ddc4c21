"""Placements in order of total cost, price per hour or finish, within the task's limits."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cavvy.domain import tasks as domain
from cavvy.domain.events import ChargeKind
from cavvy.domain.offers import ExtraPrice, Offer, Purchase
from cavvy.domain.units import HourlyRate, Money
from cavvy.domain.values import replace
from cavvy.planner.placements import Objective, PlanLimit, PlanningContext, RankingView
from cavvy.planner.rank import plan, rank
from cavvy.planner.work import MACHINE_START
from cavvy.task_files import parse_task

NOW = datetime(2026, 1, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)
HOURLY = domain.Workload(samples=3600.0, rates={"cpu": 1.0})
SLOW_DEAR = domain.Workload(samples=3600.0, rates={"cpu:4": 1.0, "cpu:8": 4.0})


def make_offer(
    name: str, usd: float, vcpus: float = 4, purchase: Purchase = Purchase.ON_DEMAND
) -> Offer:
    return Offer(
        provider="p",
        region="r",
        instance_type=name,
        vcpus=vcpus,
        memory_mib=1024,
        purchase=purchase,
        rate=HourlyRate(round(usd * 1e6)),
    )


def make_task(
    work: domain.Workload | None = None, limits: domain.JobLimits | None = None, nodes: int = 1
) -> domain.TaskSpec:
    return domain.TaskSpec(
        name="t", run="true", work=work, limits=limits or domain.JobLimits(), nodes=nodes
    )


def names(placements: object) -> list[str]:
    assert isinstance(placements, (list, tuple))
    return [placement.offer.instance_type for placement in placements]


def test_without_work_the_price_per_hour_decides_and_nothing_is_made_up() -> None:
    placements = rank(make_task(), [make_offer("dear", 2), make_offer("cheap", 1)], now=NOW)
    assert names(placements) == ["cheap", "dear"]
    assert placements[0].cost is None
    assert placements[0].finish is None


def test_with_work_the_total_decides() -> None:
    placements = rank(
        make_task(SLOW_DEAR), [make_offer("slow", 1, 4), make_offer("fast", 2, 8)], now=NOW
    )
    assert names(placements) == ["fast", "slow"]
    fast = placements[0]
    assert fast.run_time == timedelta(minutes=15)
    assert fast.wall_time == MACHINE_START + timedelta(minutes=15)
    assert fast.finish == NOW + MACHINE_START + timedelta(minutes=15)
    assert fast.cost == HourlyRate(2_000_000).over(MACHINE_START + timedelta(minutes=15))


def test_a_machine_that_starts_late_ends_late_and_costs_its_start() -> None:
    late = replace(make_offer("metal", 2, 8), boot=timedelta(minutes=10))
    same = make_offer("virtual", 2, 8)
    placements = rank(make_task(SLOW_DEAR), [late, same], now=NOW)
    assert names(placements) == ["virtual", "metal"]
    assert placements[1].wall_time == timedelta(minutes=25)
    assert placements[1].cost == HourlyRate(2_000_000).over(timedelta(minutes=25))


def test_by_time_the_finish_decides() -> None:
    offers = [make_offer("slow", 0.1, 4), make_offer("fast", 9, 8)]
    assert names(rank(make_task(SLOW_DEAR), offers, now=NOW)) == ["slow", "fast"]
    assert names(rank(make_task(SLOW_DEAR), offers, now=NOW, by=Objective.TIME)) == ["fast", "slow"]


def test_the_rate_is_the_whole_gangs() -> None:
    (placement,) = rank(make_task(nodes=3), [make_offer("a", 1)], now=NOW)
    assert placement.rate == HourlyRate(3_000_000)


def test_unknown_times_come_after_known_ones() -> None:
    work = domain.Workload(samples=3600.0, rates={"cpu": 1.0})
    task = replace(
        make_task(work),
        resources=domain.ResourceSpec(accelerators=(domain.AcceleratorNeed(count_min=0),)),
    )
    unknown = replace(make_offer("gpu", 0.01), accelerator="NoSuchThing", accelerator_count=1)
    assert names(rank(task, [unknown, make_offer("cpu", 5)], now=NOW)) == ["cpu", "gpu"]


def test_ties_go_to_the_key() -> None:
    offers = [make_offer("b", 1), make_offer("a", 1), make_offer("c", 1)]
    assert names(rank(make_task(), offers, now=NOW)) == ["a", "b", "c"]


def test_avoided_offers_come_last_and_say_so() -> None:
    cheap, dear = make_offer("cheap", 1), make_offer("dear", 2)
    placements = rank(make_task(), [cheap, dear], now=NOW, avoid={cheap.key})
    assert names(placements) == ["dear", "cheap"]
    assert [placement.avoided for placement in placements] == [False, True]


def test_places_that_are_full_now_come_after_those_that_are_not() -> None:
    full = replace(make_offer("full", 1), capacity=1)
    free, full_now = rank(make_task(nodes=2), [full, make_offer("free", 2)], now=NOW)
    assert (free.offer.instance_type, full_now.available) == ("free", False)
    assert full_now.notes[0] == "only 1 of 2 nodes are free now"


def test_the_minimum_charge_is_part_of_the_total() -> None:
    offer = replace(make_offer("a", 6), minimum_charge=10 * HOUR)
    (placement,) = rank(make_task(SLOW_DEAR), [offer], now=NOW)
    assert placement.cost == Money(60_000_000)


def test_a_limit_leaves_the_best_and_counts_all() -> None:
    made = plan(
        make_task(),
        [make_offer(str(n), n) for n in range(1, 9)],
        now=NOW,
        view=RankingView(limit=2),
    )
    assert names(made.placements) == ["1", "2"]
    assert (made.considered, made.kept) == (8, 8)


def test_each_broken_limit_is_counted_once_with_its_nearest_miss() -> None:
    limits = domain.JobLimits(duration=timedelta(minutes=30), budget=Money(1_000_000))
    offers = [
        make_offer("slow", 0.1, 4),
        make_offer("dear", 9, 8),
        make_offer("dearer", 99, 8),
        make_offer("ok", 1, 8),
    ]
    made = plan(make_task(SLOW_DEAR, limits), offers, now=NOW)
    assert names(made.placements) == ["ok"]
    assert made.rejected == {PlanLimit.DURATION: 1, PlanLimit.BUDGET: 2}
    assert [miss.offer.instance_type for miss in made.misses] == ["slow", "dear"]
    assert made.misses[0].text == "would run 1h00m, but your duration leaves 30m00s"
    assert made.misses[1].text == "would cost $2.55, but your budget leaves $1.00"


def test_a_miss_by_less_than_a_cent_is_shown_in_full() -> None:
    limits = domain.JobLimits(budget=Money(283_330))
    made = plan(make_task(SLOW_DEAR, limits), [make_offer("a", 1, 8)], now=NOW)
    assert made.misses[0].text == "would cost $0.29, but your budget leaves $0.28"
    assert made.misses[0].change == "raise limits.budget by $0.01"


def test_what_was_spent_and_run_counts_against_the_limits() -> None:
    limits = domain.JobLimits(duration=2 * HOUR, budget=Money(2_000_000))
    offer = make_offer("a", 1)
    assert rank(make_task(SLOW_DEAR, limits), [offer], now=NOW)
    ran = PlanningContext(ran=HOUR + timedelta(minutes=1))
    spent = PlanningContext(spent=Money(1_500_000))
    assert plan(make_task(SLOW_DEAR, limits), [offer], now=NOW, situation=ran).rejected == {
        PlanLimit.DURATION: 1
    }
    assert plan(make_task(SLOW_DEAR, limits), [offer], now=NOW, situation=spent).rejected == {
        PlanLimit.BUDGET: 1
    }


def test_an_interrupted_job_has_only_the_rest_to_do() -> None:
    """What it ran counts against the limit and is done: the estimate of the whole must not rule
    out its end.
    """
    task = make_task(SLOW_DEAR, domain.JobLimits(duration=HOUR + timedelta(minutes=5)))
    ran = PlanningContext(ran=timedelta(minutes=45))
    assert plan(task, [make_offer("a", 1)], now=NOW, situation=ran).rejected == {
        PlanLimit.DURATION: 1
    }
    (placement,) = rank(task, [make_offer("a", 1)], now=NOW, situation=replace(ran, done=0.75))
    assert placement.run_time == timedelta(minutes=15)
    (placement,) = rank(task, [make_offer("a", 1)], now=NOW, situation=replace(ran, done=1.0))
    assert placement.run_time == timedelta(0)


@pytest.mark.parametrize(
    "limits",
    [
        domain.JobLimits(duration=HOUR + timedelta(minutes=5)),
        domain.JobLimits(budget=Money(1_200_000)),
    ],
)
def test_work_that_an_interruption_lost_does_not_end_a_job_that_goes_on(
    limits: domain.JobLimits,
) -> None:
    """The estimate is rough, so a limit that was enough for the whole ends the job only when it
    is reached.
    """
    task = make_task(SLOW_DEAR, limits)
    lost = PlanningContext(ran=timedelta(minutes=30), spent=Money(500_000), done=0.1)
    resumes = replace(task, checkpoint=domain.CheckpointPolicy(path="c"))
    assert plan(task, [make_offer("a", 1)], now=NOW, situation=lost).rejected
    assert rank(resumes, [make_offer("a", 1)], now=NOW, situation=lost)
    over = replace(lost, ran=2 * HOUR, spent=Money(1_200_000))
    assert plan(resumes, [make_offer("a", 1)], now=NOW, situation=over).rejected


def test_work_that_was_done_is_a_share_of_it_wherever_it_was_done() -> None:
    """Half of it is half of it: the hours that it took on a slow machine say nothing of the
    hours on a fast one.
    """
    slow, fast = make_offer("slow", 1, 1), make_offer("fast", 1, 4)
    half = PlanningContext(ran=2 * HOUR, done=0.5)
    times = {
        place.offer.key: place.run_time
        for place in rank(make_task(SLOW_DEAR), [slow, fast], now=NOW)
    }
    for place in rank(make_task(SLOW_DEAR), [slow, fast], now=NOW, situation=half):
        whole = times[place.offer.key]
        assert whole is not None
        assert place.run_time == whole / 2


def test_a_deadline_counts_from_the_submission() -> None:
    task = make_task(SLOW_DEAR, domain.JobLimits(deadline_after=2 * HOUR))
    offer = make_offer("a", 1)
    assert rank(task, [offer], now=NOW)
    late = plan(task, [offer], now=NOW, situation=PlanningContext(submitted_at=NOW - HOUR))
    assert late.misses[0].text == "would take 1h02m, but your deadline leaves 1h00m"


def test_limits_are_compared_with_the_time_that_the_work_may_take() -> None:
    limits = domain.JobLimits(deadline_after=timedelta(minutes=70), budget=Money(1_300_000))
    offers = [make_offer("a", 1)]
    sure = plan(make_task(HOURLY, limits), offers, now=NOW)
    assert sure.placements[0].run_time == HOUR
    doubtful = plan(make_task(replace(HOURLY, margin=1.2), limits), offers, now=NOW)
    assert doubtful.misses[0].text.startswith("would take 1h14m, but your deadline leaves 1h10m")
    cheap = domain.JobLimits(budget=Money(1_300_000))
    assert plan(make_task(replace(HOURLY, margin=1.2), cheap), offers, now=NOW).placements
    dear = plan(make_task(replace(HOURLY, margin=1.3), cheap), offers, now=NOW)
    assert dear.misses[0].limit is PlanLimit.BUDGET


def test_a_deadline_that_has_passed_rejects_even_what_has_no_estimate() -> None:
    made = plan(make_task(limits=domain.JobLimits(deadline=NOW)), [make_offer("a", 1)], now=NOW)
    assert made.misses[0].text == "your deadline has passed"


def test_an_unknown_cost_breaks_no_budget_but_says_how_long_it_lasts() -> None:
    (placement,) = rank(
        make_task(limits=domain.JobLimits(budget=Money(6_000_000))), [make_offer("a", 2)], now=NOW
    )
    assert "the budget lasts 3h00m" in placement.notes


def test_spot_costs_more_time_and_says_how_much() -> None:
    task = replace(
        make_task(domain.Workload(samples=36000.0, rates={"cpu": 1.0})),
        checkpoint=domain.CheckpointPolicy(path="c", every=HOUR / 6),
    )
    (placement,) = rank(task, [make_offer("s", 1, purchase=Purchase.SPOT)], now=NOW)
    loss = placement.spot_loss
    assert loss is not None
    assert loss.time is not None
    assert placement.run_time == 10 * HOUR
    assert placement.wall_time == placement.run_time + MACHINE_START + loss.time
    assert loss.cost == placement.rate.over(loss.time)
    assert loss.preemptions is not None
    assert 2 < loss.preemptions < 2.2  # 10 h at 0.2 per hour, and a little for work done again


def test_spot_without_checkpoints_is_dearer_than_with_and_may_be_hopeless() -> None:
    def cost(hours: float, checkpoint: domain.CheckpointPolicy | None) -> Money | None:
        task = replace(
            make_task(domain.Workload(samples=3600 * hours, rates={"cpu": 1.0})),
            checkpoint=checkpoint,
        )
        return rank(task, [make_offer("s", 1, purchase=Purchase.SPOT)], now=NOW)[0].cost

    with_one, without = cost(10, domain.CheckpointPolicy(path="c")), cost(10, None)
    assert with_one is not None
    assert without is not None
    assert with_one < without
    assert cost(100, None) is None


def test_too_few_retries_for_the_expected_preemptions_are_said() -> None:
    task = replace(
        make_task(domain.Workload(samples=360000.0, rates={"cpu": 1.0})),
        checkpoint=domain.CheckpointPolicy(path="c"),
    )
    task = replace(task, retry=domain.RetryPolicy(preemption=2))
    (placement,) = rank(task, [make_offer("s", 1, purchase=Purchase.SPOT)], now=NOW)
    assert any("the 2 that retry.preemption allows" in note for note in placement.notes)


def test_disks_and_addresses_are_part_of_the_cost() -> None:
    """A cheap machine with a dear disk comes after a dearer machine without one."""
    disk = ExtraPrice(kind=ChargeKind.DISK, name="ssd", price=Money(7_300_000), usual=100)
    cheap = replace(make_offer("cheap", 1), extras=(disk,))  # a dollar an hour for the disk
    plain = make_offer("plain", 1.5)
    for work in (None, SLOW_DEAR):
        best, second = rank(make_task(work, nodes=2), [cheap, plain], now=NOW)
        assert names([best, second]) == ["plain", "cheap"]
        assert any("addresses cost $2.00/h more" in note for note in second.notes)
        assert not any("addresses" in note for note in best.notes)
    assert best.cost is not None
    assert second.cost is not None
    assert abs(second.cost.micros - best.cost.micros * 4 / 3) <= 1
    small = replace(make_task(), resources=domain.ResourceSpec(disk_gib=10))
    assert names(rank(small, [cheap, plain], now=NOW)) == ["cheap", "plain"]


def test_egress_is_priced_where_size_and_price_are_known() -> None:
    offer = make_offer("a", 0)
    known = PlanningContext(output_mib=1000, egress={"p": Money(90_000), "p/r": Money(100_000)})
    (placement,) = rank(make_task(SLOW_DEAR), [offer], now=NOW, situation=known)
    assert placement.egress == Money(104_858)  # 1000 MiB are 1.048576 GB
    assert placement.cost == Money(104_858)


def test_an_unknown_egress_price_is_said_and_not_taken_for_nothing() -> None:
    (placement,) = rank(
        make_task(SLOW_DEAR),
        [make_offer("a", 0)],
        now=NOW,
        situation=PlanningContext(output_mib=2048),
    )
    assert placement.egress is None
    assert "the egress price is unknown and not included in the total" in placement.notes


def test_the_price_per_gb_is_noted_where_only_the_size_is_unknown() -> None:
    task = replace(make_task(), outputs=(domain.Transfer(source="out", target="s3://b/out"),))
    (placement,) = rank(
        task, [make_offer("a", 0)], now=NOW, situation=PlanningContext(egress={"p": Money(90_000)})
    )
    assert "egress costs $0.09/GB, which the total does not include" in placement.notes
    (placement,) = rank(
        task, [make_offer("a", 0)], now=NOW, situation=PlanningContext(egress={"p": Money(300)})
    )
    assert "egress costs $0.0003/GB, which the total does not include" in placement.notes


offers = st.lists(
    st.builds(
        make_offer,
        st.text("abcd", min_size=1, max_size=4),
        st.integers(0, 5),
        st.sampled_from([2, 4, 8, 16]),
        st.sampled_from([Purchase.ON_DEMAND, Purchase.SPOT]),
    ),
    max_size=12,
    unique_by=lambda offer: offer.key,
)
tasks = st.builds(
    make_task,
    st.sampled_from([None, SLOW_DEAR, domain.Workload(flops=1e15, precision="fp32")]),
    st.builds(
        domain.JobLimits,
        budget=st.none() | st.integers(0, 5_000_000).map(Money),
        duration=st.none() | st.integers(0, 7200).map(lambda s: timedelta(seconds=s)),
        deadline_after=st.none() | st.integers(0, 7200).map(lambda s: timedelta(seconds=s)),
    ),
    st.integers(1, 4),
)


@given(tasks, offers, st.randoms(), st.sampled_from(Objective))
def test_the_order_does_not_depend_on_the_order_of_the_question(
    task: domain.TaskSpec, given_offers: list[Offer], random: object, by: Objective
) -> None:
    shuffled = list(given_offers)
    random.shuffle(shuffled)  # type: ignore[attr-defined]  # hypothesis hands out a random.Random
    assert rank(task, given_offers, now=NOW, by=by) == rank(task, shuffled, now=NOW, by=by)


@given(tasks, offers)
def test_every_offer_is_kept_or_counted_and_what_is_kept_keeps_the_limits(
    task: domain.TaskSpec, given_offers: list[Offer]
) -> None:
    made = plan(task, given_offers, now=NOW)
    assert (
        made.considered == len(given_offers) == len(made.placements) + sum(made.rejected.values())
    )
    budget, duration, after = task.limits.budget, task.limits.duration, task.limits.deadline_after
    for placement in made.placements:
        assert budget is None or placement.cost is None or placement.cost <= budget
        assert duration is None or placement.run_time is None or placement.run_time <= duration
        assert after is None or placement.finish is None or placement.finish <= NOW + after


@given(tasks, offers, st.integers(0, 15))
def test_the_best_few_are_the_first_of_all(
    task: domain.TaskSpec, given_offers: list[Offer], few: int
) -> None:
    made = plan(task, given_offers, now=NOW, view=RankingView(limit=few))
    assert list(made.placements) == rank(task, given_offers, now=NOW)[:few]


@given(tasks, offers)
def test_distinct_is_the_first_of_each_kind(
    task: domain.TaskSpec, given_offers: list[Offer]
) -> None:
    everywhere = [
        replace(offer, region=region) for offer in given_offers for region in ("r1", "r2")
    ]
    first: dict[tuple[str, Purchase], Offer] = {}
    for placement in rank(task, everywhere, now=NOW):
        first.setdefault((placement.offer.instance_type, placement.offer.purchase), placement.offer)
    made = plan(task, everywhere, now=NOW, view=RankingView(distinct=True))
    assert [placement.offer for placement in made.placements] == list(first.values())
    assert made.considered == len(everywhere)


def test_an_offer_that_breaks_several_limits_says_every_change_that_it_takes() -> None:
    dear = make_offer("dear", 12)
    limits = domain.JobLimits(duration=timedelta(minutes=30), budget=Money(1_000_000))
    (miss,) = plan(make_task(HOURLY, limits), [dear], now=NOW).misses
    assert miss.broken == 2
    assert miss.text.startswith(
        "would run 1h00m, but your duration leaves 30m00s and would cost $12."
    )
    assert miss.change.startswith("raise limits.duration by 30m00s and raise limits.budget by $11.")


def test_of_equal_misses_the_one_that_breaks_fewer_limits_and_then_the_cheaper_is_nearest() -> None:
    dear, cheap, fair = make_offer("a", 12), make_offer("c", 0.5), make_offer("b", 0.9)
    limits = domain.JobLimits(duration=timedelta(minutes=30), budget=Money(1_000_000))
    (miss,) = plan(make_task(HOURLY, limits), [dear, fair, cheap], now=NOW).misses
    assert miss.offer is cheap
    assert miss.broken == 1


def test_what_may_never_end_is_the_last_of_the_misses() -> None:
    limits = domain.JobLimits(deadline_after=timedelta(hours=100))
    work = domain.Workload(
        samples=3600.0 * 400, rates={"cpu": 1.0}
    )  # without checkpoints, spot is taken away before it is done
    offers = [make_offer("spot", 0.1, purchase=Purchase.SPOT), make_offer("dear", 12)]
    (miss,) = plan(make_task(work, limits), offers, now=NOW).misses
    assert miss.offer is offers[1]


def test_the_time_of_a_whole_slice_is_that_of_the_gang_of_its_hosts() -> None:
    text = 'run: x\nnodes: 2\nresources: {gpu: "TPU-v5e:16"}\nwork: {duration: 2h}\n'
    task = parse_task(text)
    assert task.work is not None
    assert (task.nodes, task.work.measured_on) == (8, "TPU-v5e:4")
    other = parse_task(text.replace("2h}", "2h, measured_on: cpu}"))
    assert other.work is not None
    assert other.work.measured_on == "cpu"

"""Jobs that are to end in time at the least cost: the reconcilers ask the deadline policy, on
virtual time.
"""

from datetime import timedelta
from itertools import pairwise

from tests.records import FIXED, SPOT
from tests.sim.scenario_checks import check_all, tell

from cavvy.domain.budgets import SpendingBudget
from cavvy.domain.jobs import AttemptOutcome, JobPhase
from cavvy.domain.markets import ObservationKind
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.tasks import (
    CheckpointPolicy,
    JobLimits,
    ResourceSpec,
    RetryPolicy,
    SpotPolicy,
    TaskSpec,
    Workload,
)
from cavvy.domain.units import HourlyRate, Money
from cavvy.domain.values import replace
from cavvy.providers.fake.script import CallOutcome, CloudScript, FaultScript, PriceChange
from cavvy.sim.harness import START, play
from cavvy.sim.scenario import JobTrace, ScenarioResult, SimScenario, SimSubmission

SPOT_B = replace(SPOT, zone="b", rate=HourlyRate(310_000))
FIXED_B = replace(FIXED, zone="b")
HOUR = timedelta(hours=1)


def task(hours: float = 4, deadline: timedelta = 8 * HOUR, **changes: object) -> TaskSpec:
    made = TaskSpec(
        name="digits",
        run="train",
        env={"FAKE_RUN_S": str(hours * 3600)},
        resources=ResourceSpec(spot=SpotPolicy.AUTO),
        checkpoint=CheckpointPolicy(path="c", every=timedelta(minutes=10)),
        limits=JobLimits(deadline_after=deadline),
        work=Workload(samples=hours * 3600, rates={"cpu": 1.0}),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def run_scenario(
    job: TaskSpec, *launches: FaultScript, offers: tuple[Offer, ...] = (SPOT, FIXED), **more: object
) -> JobTrace:
    return only(play_scenario(job, *launches, offers=offers, **more))


def play_scenario(
    job: TaskSpec,
    *launches: FaultScript,
    offers: tuple[Offer, ...] = (SPOT, FIXED),
    budgets: tuple[SpendingBudget, ...] = (),
    **more: object,
) -> ScenarioResult:
    script = CloudScript(offers=offers, launches=launches, **more)  # type: ignore[arg-type]
    submissions = (SimSubmission(task=job),)
    ending = play(SimScenario(submissions=submissions, script=script, budgets=budgets))
    check_all(ending)
    return ending


def only(ending: ScenarioResult) -> JobTrace:
    [trace] = ending.traces
    return trace


def bought(trace: JobTrace) -> list[tuple[str | None, str, AttemptOutcome | None]]:
    return [
        (attempt.offer.zone, str(attempt.offer.purchase), attempt.outcome)
        for attempt in trace.attempts
    ]


def in_time(trace: JobTrace) -> bool:
    limit = START + (trace.job.task.limits.deadline_after or timedelta.max)
    return (
        trace.job.phase is JobPhase.DONE
        and trace.job.ended_at is not None
        and trace.job.ended_at <= limit
    )


def test_with_slack_a_job_runs_on_spot_and_says_why() -> None:
    trace = run_scenario(task())
    assert bought(trace) == [("a", "spot", AttemptOutcome.SUCCEEDED)]
    assert trace.job.plan_state is not None
    assert trace.job.plan_state.mode == "spot"
    placed = next(event for event in trace.events if event.kind == "placed")
    assert "spot" in placed.text.partition(": ")[2]


def test_without_slack_a_job_runs_on_demand_at_once() -> None:
    trace = run_scenario(task(hours=4, deadline=timedelta(hours=4.2)))
    assert bought(trace) == [("a", "on-demand", AttemptOutcome.SUCCEEDED)], tell(trace)
    assert in_time(trace)


def test_spot_that_is_sold_out_is_waited_for_only_while_there_is_time() -> None:
    refusals = [FaultScript(reply=CallOutcome.NO_CAPACITY)] * 60
    trace = run_scenario(
        task(hours=2, deadline=timedelta(hours=4)),
        *refusals,
        offers=(replace(SPOT, capacity=0), FIXED),
    )
    assert trace.attempts[-1].offer.purchase is Purchase.ON_DEMAND or not in_time(trace)


def test_a_job_that_loses_spot_again_and_again_ends_on_demand_in_time() -> None:
    fault_scripts = [FaultScript(preempted_after_s=1500, notice_s=120)] * 30
    trace = run_scenario(task(hours=4, deadline=5.5 * HOUR), *fault_scripts[:8])
    assert in_time(trace), tell(trace)


def test_a_notice_starts_the_next_gang_while_the_first_shuts_down() -> None:
    trace = run_scenario(
        task(),
        FaultScript(preempted_after_s=4000, notice_s=120),
        offers=(SPOT, FIXED, SPOT_B, FIXED_B),
    )
    first, second = trace.attempts[:2]
    assert first.outcome is AttemptOutcome.PREEMPTED
    assert first.ended_at is not None
    assert second.created_at < first.ended_at, tell(trace)
    assert "takeover" in [event.kind for event in trace.events]
    assert in_time(trace)


def test_a_gang_on_spot_that_does_not_boot_is_left_for_on_demand_in_time() -> None:
    trace = run_scenario(task(hours=4, deadline=timedelta(hours=4.4)), FaultScript(boots=False))
    assert in_time(trace), tell(trace)
    assert trace.attempts[-1].offer.purchase is Purchase.ON_DEMAND


def test_an_agent_on_spot_that_falls_silent_is_left_while_on_demand_still_ends_in_time() -> None:
    """Its lease is longer than the deadline: nobody may wait for its end."""
    limits = JobLimits(deadline_after=6 * HOUR, unattended=12 * HOUR)
    trace = run_scenario(task(hours=4, limits=limits), FaultScript(mute_after_s=2 * 3600))
    assert in_time(trace), tell(trace)
    assert bought(trace)[0][:2] == ("a", "spot")
    assert bought(trace)[-1] == ("a", "on-demand", AttemptOutcome.SUCCEEDED)


def test_refusals_are_tried_elsewhere_at_once() -> None:
    offers = (SPOT, FIXED, SPOT_B, FIXED_B)
    trace = run_scenario(task(), FaultScript(reply=CallOutcome.NO_CAPACITY), offers=offers)
    assert bought(trace)[:2] == [
        ("a", "spot", AttemptOutcome.CAPACITY),
        ("b", "spot", AttemptOutcome.SUCCEEDED),
    ], tell(trace)
    assert trace.attempts[1].created_at - trace.attempts[0].created_at < timedelta(seconds=5)


def test_what_was_seen_of_markets_is_written_down() -> None:
    trace = run_scenario(
        task(), FaultScript(reply=CallOutcome.NO_CAPACITY), FaultScript(preempted_after_s=3000)
    )
    kinds = [(seen.market, seen.kind) for seen in trace.observations]
    assert (SPOT.key, ObservationKind.REFUSED) in kinds
    assert (SPOT.key, ObservationKind.PRICE) in kinds
    assert {
        ObservationKind.GRANTED,
        ObservationKind.BOOTED,
        ObservationKind.TAKEN,
        ObservationKind.ENDED,
    } <= {kind for _, kind in kinds}
    [taken] = [seen for seen in trace.observations if seen.kind is ObservationKind.TAKEN]
    assert 2900 < taken.seconds < 3100


def test_spot_that_became_dear_is_left_for_another_zone_at_a_checkpoint_without_a_stop() -> None:
    change = PriceChange(offer=SPOT.key, at_s=3000, rate=HourlyRate(950_000))
    ending = play_scenario(
        task(hours=6, deadline=12 * HOUR), offers=(SPOT, FIXED, SPOT_B, FIXED_B), prices=(change,)
    )
    trace = only(ending)
    assert bought(trace) == [
        ("a", "spot", AttemptOutcome.PREEMPTED),
        ("b", "spot", AttemptOutcome.SUCCEEDED),
    ], tell(trace)
    kinds = [event.kind for event in trace.events]
    assert [kind for kind in kinds if kind in ("standby", "handover", "takeover")] == [
        "standby",
        "handover",
        "takeover",
    ]
    first, second = [(since, until) for _, _, since, until in ending.cloud.storage.work]
    assert first[1] is not None
    assert timedelta(0) <= second[0] - first[1] < timedelta(seconds=15), (
        "the other gang was there already"
    )
    assert ObservationKind.TAKEN not in {seen.kind for seen in trace.observations}, (
        "a move is not the market's fault"
    )
    assert not trace.job.retries.get("node")


def test_a_move_to_another_region_is_made_only_if_it_pays_for_the_checkpoint_that_leaves() -> None:
    """The newest checkpoint's size counts, 1 MiB here, and not what its author expected."""
    change = PriceChange(offer=SPOT.key, at_s=3000, rate=HourlyRate(950_000))
    offers = (SPOT, FIXED, replace(SPOT_B, region="far"), replace(FIXED_B, region="far"))
    job = task(
        hours=6,
        deadline=12 * HOUR,
        checkpoint=CheckpointPolicy(path="c", every=HOUR / 6, size_mib=40_000),
    )
    for price, zones in ((0, ["a", "b"]), (1_000_000, ["a", "b"]), (20_000_000_000, ["a"])):
        script = CloudScript(offers=offers, prices=(change,))
        ending = play(
            SimScenario(
                submissions=(SimSubmission(task=job),),
                script=script,
                egress={"fake/r": Money(price)},
            )
        )
        check_all(ending)
        trace = only(ending)
        assert [attempt.offer.zone for attempt in trace.attempts] == zones, tell(trace)


def test_a_second_gang_that_is_refused_costs_the_first_nothing() -> None:
    change = PriceChange(offer=SPOT.key, at_s=3000, rate=HourlyRate(950_000))
    fault_scripts = (FaultScript(), *[FaultScript(reply=CallOutcome.NO_CAPACITY)] * 9)
    job = task(hours=3, deadline=12 * HOUR)
    trace = run_scenario(
        job, *fault_scripts, offers=(SPOT, FIXED, SPOT_B, FIXED_B), prices=(change,)
    )
    assert trace.job.phase is JobPhase.DONE
    assert (trace.attempts[0].outcome, trace.job.attempt) == (AttemptOutcome.SUCCEEDED, 1), tell(
        trace
    )
    assert {attempt.outcome for attempt in trace.attempts[1:]} <= {
        AttemptOutcome.CAPACITY,
        AttemptOutcome.STOPPED,
    }
    assert len(trace.attempts) > 1


def test_places_tried_at_the_same_time_give_the_work_to_the_first_that_is_ready() -> None:
    offers = (SPOT, FIXED, SPOT_B, FIXED_B)
    slow, quick = FaultScript(boot_s=900), FaultScript(boot_s=30)
    ending = play_scenario(task(retry=RetryPolicy(parallel=2)), slow, quick, offers=offers)
    trace = only(ending)
    assert bought(trace) == [
        ("a", "spot", AttemptOutcome.STOPPED),
        ("b", "spot", AttemptOutcome.SUCCEEDED),
    ], tell(trace)
    assert trace.attempts[0].created_at == trace.attempts[1].created_at
    assert trace.attempts[0].ended_at is not None
    assert trace.attempts[0].ended_at - START < timedelta(minutes=3), (
        "the slow one is given back at once"
    )
    assert [gang[-2:] for gang, _, _, _ in ending.cloud.storage.work] == ["-2"]


def test_of_places_tried_at_the_same_time_those_that_refuse_cost_no_time() -> None:
    offers = (SPOT, FIXED, SPOT_B, FIXED_B)
    trace = run_scenario(
        task(retry=RetryPolicy(parallel=2)),
        FaultScript(reply=CallOutcome.NO_CAPACITY),
        FaultScript(),
        offers=offers,
    )
    assert trace.job.phase is JobPhase.DONE
    assert (trace.job.attempt, trace.attempts[0].outcome) == (2, AttemptOutcome.CAPACITY), tell(
        trace
    )
    assert trace.attempts[1].created_at == trace.attempts[0].created_at
    assert "avoided" not in [event.kind for event in trace.events] or SPOT.key in trace.job.avoid
    assert in_time(trace)


def test_without_a_deadline_several_places_are_tried_too() -> None:
    job = task(limits=JobLimits(), retry=RetryPolicy(parallel=3))
    ending = play_scenario(
        job,
        FaultScript(boot_s=900),
        FaultScript(boot_s=300),
        FaultScript(boot_s=30),
        offers=(SPOT, FIXED, SPOT_B),
    )
    trace = only(ending)
    assert trace.job.phase is JobPhase.DONE
    assert trace.job.attempt == 3, tell(trace)
    assert len({gang for gang, _, _, _ in ending.cloud.storage.work}) == 1


def test_any_job_that_gets_a_notice_has_its_next_gang_started_at_once() -> None:
    job = task(limits=JobLimits(), work=None, resources=ResourceSpec(spot=SpotPolicy.ONLY))
    trace = run_scenario(
        job, FaultScript(preempted_after_s=4000, notice_s=120), offers=(SPOT, SPOT_B)
    )
    first, second = trace.attempts
    assert (first.outcome, second.outcome) == (AttemptOutcome.PREEMPTED, AttemptOutcome.SUCCEEDED)
    assert first.ended_at is not None
    assert second.created_at < first.ended_at
    assert second.offer.zone != first.offer.zone
    assert trace.job.retries == {"preemption": 1}


def test_no_gang_is_started_for_a_job_that_may_not_be_preempted_again() -> None:
    job = task(limits=JobLimits(), retry=RetryPolicy(preemption=0))
    trace = run_scenario(
        job, FaultScript(preempted_after_s=4000, notice_s=120), offers=(SPOT, SPOT_B, FIXED)
    )
    assert trace.job.phase is JobPhase.FAILED
    assert len(trace.attempts) == 1


def test_a_move_counts_against_no_limit_of_preemptions() -> None:
    job = task(
        limits=JobLimits(),
        work=None,
        resources=ResourceSpec(spot=SpotPolicy.ONLY),
        retry=RetryPolicy(preemption=1),
    )
    fault_scripts = (
        FaultScript(advised_after_s=3000, preempted_after_s=9000, notice_s=0),
        FaultScript(preempted_after_s=3000, notice_s=0),
    )
    trace = run_scenario(job, *fault_scripts, offers=(SPOT, SPOT_B))
    assert trace.job.phase is JobPhase.DONE, tell(trace)
    assert trace.job.retries == {"advice": 1, "move": 1, "preemption": 1}


def test_a_job_that_was_interrupted_has_only_the_rest_to_do_before_its_deadline() -> None:
    job = task(hours=4, deadline=6.5 * HOUR, resources=ResourceSpec(spot=SpotPolicy.NEVER))
    trace = run_scenario(job, FaultScript(preempted_after_s=3 * 3600, notice_s=0), offers=(FIXED,))
    assert len(trace.attempts) == 2, tell(trace)
    assert in_time(trace)


def test_what_an_attempt_before_has_spent_counts_against_the_budget() -> None:
    limits = JobLimits(budget=Money(600_000))
    trace = run_scenario(
        task(limits=limits, work=None), FaultScript(preempted_after_s=5400), offers=(SPOT,)
    )
    assert (trace.job.phase, len(trace.attempts)) == (JobPhase.FAILED, 2), tell(trace)
    spent = [
        sum(c.amount.micros for c in trace.charges if c.attempt_id == each.id)
        for each in trace.attempts
    ]
    assert spent[0] > 400_000
    assert 590_000 < sum(spent) <= 600_000, tell(trace)


def test_a_gang_that_is_said_to_be_at_risk_saves_and_leaves_for_spot_of_about_the_price() -> None:
    fault_script = FaultScript(advised_after_s=3000, preempted_after_s=6000, notice_s=0)
    offers = (SPOT, FIXED, SPOT_B, FIXED_B)
    for job in (
        task(),
        task(limits=JobLimits(), work=None, resources=ResourceSpec(spot=SpotPolicy.ONLY)),
    ):
        ending = play_scenario(job, fault_script, offers=offers)
        trace = only(ending)
        assert bought(trace) == [
            ("a", "spot", AttemptOutcome.PREEMPTED),
            ("b", "spot", AttemptOutcome.SUCCEEDED),
        ], tell(trace)
        kinds = [event.kind for event in trace.events if event.attempt in (1, 2)]
        assert [
            kind for kind in kinds if kind in ("advice", "standby", "handover", "takeover")
        ] == [
            "advice",
            "standby",
            "handover",
            "takeover",
        ]
        at = {event.kind: event.at for event in trace.events}
        saved = [
            event.at
            for event in trace.events
            if event.kind == "checkpoint" and event.at >= at["advice"]
        ]
        assert saved[0] - at["advice"] < timedelta(seconds=5), "it saves at once"
        [standby] = [event for event in trace.events if event.kind == "standby"]
        assert "at risk" in standby.text
        assert at["takeover"] - START < timedelta(seconds=6000), "before the place took it"
        first, second = [(since, until) for _, _, since, until in ending.cloud.storage.work]
        assert first[1] is not None
        assert second[0] - first[1] < timedelta(seconds=15)
        assert ObservationKind.TAKEN not in {seen.kind for seen in trace.observations}


def test_places_that_say_again_and_again_that_they_are_at_risk_do_not_keep_a_job_moving() -> None:
    zones = [replace(SPOT_B, zone=zone, rate=SPOT.rate) for zone in "bcdefgh"]
    advised = tuple(FaultScript(advised_after_s=400) for _ in range(60))
    job = task(hours=8, limits=JobLimits(), work=None, resources=ResourceSpec(spot=SpotPolicy.ONLY))
    trace = run_scenario(job, *advised, offers=(SPOT, *zones))
    assert trace.job.phase is JobPhase.DONE
    moves = [event.at for event in trace.events if event.kind == "takeover"]
    assert 2 < len(moves) < 9, tell(trace)
    stays = [later - earlier for earlier, later in pairwise(moves)]
    assert stays[-1] > 2 * stays[1]


def test_a_gang_at_risk_stays_if_a_budget_permits_no_second_one() -> None:
    budget = SpendingBudget(name="b", limit=Money(200_000), since=START)
    trace = only(
        play_scenario(
            task(),
            FaultScript(advised_after_s=3000),
            offers=(SPOT, FIXED, SPOT_B, FIXED_B),
            budgets=(budget,),
        )
    )
    assert bought(trace) == [("a", "spot", AttemptOutcome.SUCCEEDED)], tell(trace)


def test_a_gang_at_risk_stays_where_no_other_spot_is_there_for_about_its_price_and_says_so_once() -> (
    None
):
    dear = (replace(SPOT_B, rate=HourlyRate(600_000)), FIXED_B)
    for job in (
        task(),
        task(limits=JobLimits(), work=None, resources=ResourceSpec(spot=SpotPolicy.ONLY)),
    ):
        trace = run_scenario(job, FaultScript(advised_after_s=3000), offers=(SPOT, FIXED, *dear))
        assert bought(trace) == [("a", "spot", AttemptOutcome.SUCCEEDED)], tell(trace)
        [stays] = [event for event in trace.events if event.kind == "stays"]
        assert "at risk" in stays.text


def test_work_that_saves_nothing_is_not_moved_when_it_is_at_risk() -> None:
    job = task(hours=1, deadline=12 * HOUR, checkpoint=None)
    trace = run_scenario(
        job, FaultScript(advised_after_s=1000), offers=(SPOT, FIXED, SPOT_B, FIXED_B)
    )
    assert bought(trace) == [("a", "spot", AttemptOutcome.SUCCEEDED)], tell(trace)


def test_on_demand_is_left_for_on_demand_that_became_cheaper_elsewhere() -> None:
    """Its spot is sold out everywhere, and so much slack is not left that waiting for it would
    do.
    """
    change = PriceChange(offer=FIXED_B.key, at_s=3600, rate=HourlyRate(400_000))
    offers = (FIXED, replace(FIXED_B, rate=HourlyRate(1_100_000)), replace(SPOT, capacity=0))
    trace = run_scenario(
        task(hours=3, deadline=timedelta(hours=3.6)), offers=offers, prices=(change,)
    )
    assert bought(trace) == [
        ("a", "on-demand", AttemptOutcome.PREEMPTED),
        ("b", "on-demand", AttemptOutcome.SUCCEEDED),
    ], tell(trace)
    [standby] = [event for event in trace.events if event.kind == "standby"]
    assert "on-demand is cheaper in another market" in standby.text
    assert in_time(trace)


def test_a_gang_on_demand_is_given_back_once_waiting_for_spot_is_cheaper_and_the_slack_is_long() -> (
    None
):
    """On demand costs less than spot at first, so nothing is waited for; then its price rises
    fivefold.
    """
    change = PriceChange(offer=FIXED.key, at_s=900, rate=HourlyRate(1_000_000))
    offers = (replace(FIXED, rate=HourlyRate(200_000)), replace(SPOT, capacity=0))
    trace = run_scenario(task(hours=1.5, deadline=10 * HOUR), offers=offers, prices=(change,))
    assert bought(trace) == [
        ("a", "on-demand", AttemptOutcome.PREEMPTED),
        ("a", "on-demand", AttemptOutcome.SUCCEEDED),
    ], tell(trace)
    first, second = trace.attempts
    assert first.created_at == START, "on-demand costs no more than spot"
    assert first.ended_at is not None
    assert second.created_at - first.ended_at > HOUR, "it is not given back for a short wait"
    [given] = [event for event in trace.events if event.text.startswith("gives ")]
    assert "enough slack to wait for spot" in given.text
    assert in_time(trace)

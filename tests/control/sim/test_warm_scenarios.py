"""Gangs that are kept for the project's next job: who gets them, when they go, and that every
second is paid once.
"""

from datetime import timedelta

import pytest
from tests.sim.sim.test_sim_scenarios import CHEAP, DEAR, SPOT, only, run_scenario, task

from cavvy.domain.budgets import SpendingBudget
from cavvy.domain.events import Charge, ChargeKind
from cavvy.domain.jobs import AttemptOutcome, JobPhase
from cavvy.domain.tasks import JobLimits, ResourceSpec, SpotPolicy, TaskSpec
from cavvy.domain.units import Money
from cavvy.domain.values import replace
from cavvy.providers.fake.script import FaultScript
from cavvy.sim.harness import START
from cavvy.sim.scenario import (
    CrashMoment,
    JobTrace,
    ScenarioResult,
    ServerCrash,
    SimSubmission,
    UserAction,
    UserIntervention,
)

KEEP = timedelta(minutes=10)
LATER_S = 900  # the work of the first ends at 630 s


def warm(run_s: float = 600, **changes: object) -> TaskSpec:
    return task(run_s, keep=KEEP, **changes)


def two(first: TaskSpec, second: TaskSpec, at_s: float = LATER_S, **more: object) -> ScenarioResult:
    return run_scenario(
        submissions=(SimSubmission(task=first), SimSubmission(task=second, at_s=at_s)), **more
    )


def spans(charges: list[Charge] | tuple[Charge, ...] | object, kind: ChargeKind) -> timedelta:
    return sum((c.until - c.since for c in charges if c.kind is kind), timedelta(0))  # type: ignore[attr-defined]


def bought(ending: ScenarioResult) -> int:
    return len(ending.cloud.gang_list)


def kinds(trace: JobTrace) -> list[str]:
    return [event.kind for event in trace.events]


def test_the_next_job_takes_the_gang_over_and_waits_for_no_boot() -> None:
    ending = two(warm(), task(name="next"))
    first, second = ending.traces
    assert bought(ending) == 1
    assert [trace.job.phase for trace in ending.traces] == [JobPhase.DONE, JobPhase.DONE]
    assert second.attempts[0].running_at is not None
    assert second.attempts[0].running_at - second.attempts[0].created_at < timedelta(seconds=15)
    assert first.attempts[0].ended_at == second.attempts[0].adopted_at
    assert (
        spans(first.charges, ChargeKind.KEPT)
        == second.attempts[0].adopted_at - first.attempts[0].kept_since
    )  # type: ignore[operator]
    assert not [charge for charge in second.charges if charge.kind is ChargeKind.KEPT]


@pytest.mark.parametrize("told_late_s", [0, 61, 62])
@pytest.mark.parametrize("after_s", [0, 0.3, 1, 2])
def test_a_job_that_comes_as_its_forerunner_ends_takes_the_gang_over(
    told_late_s: float, after_s: float
) -> None:
    late = FaultScript(
        boot_s=30, told_late_s=told_late_s
    )  # a kubelet tells the start of a pod up to two seconds late
    ending = two(warm(30), task(30, name="next"), at_s=61 + after_s, launches=(late,))
    assert bought(ending) == 1
    first, second = ending.traces
    charges = [*first.charges, *second.charges]
    (machine,) = ending.cloud.gang_list[0].machines
    assert machine.ended_at is not None
    paid = sum((charge.until - charge.since for charge in charges), timedelta(0))
    assert abs(paid - (machine.ended_at - machine.started_at)) < timedelta(seconds=1)


def test_a_gang_that_nobody_wants_goes_when_its_time_is_over() -> None:
    trace = only(run_scenario(warm()))
    [attempt] = trace.attempts
    assert attempt.kept_since is not None
    assert attempt.ended_at is not None
    assert timedelta(0) <= attempt.ended_at - attempt.kept_since - KEEP < timedelta(minutes=1)
    assert KEEP <= spans(trace.charges, ChargeKind.KEPT) < KEEP + timedelta(minutes=1)
    assert trace.job.ended_at == attempt.finished_at, "the job is done long before"


def test_a_kept_gang_goes_at_the_hard_stop_of_a_budget() -> None:
    # The work costs 1000000 micro-dollars an hour, and ends at 630 s.
    budget = SpendingBudget(name="b", limit=Money(200_000), hard_percent=100, since=START)
    trace = only(run_scenario(warm(), budgets=(budget,)))
    [attempt] = trace.attempts
    assert trace.job.phase is JobPhase.DONE
    assert attempt.kept_since is not None
    assert attempt.ended_at is not None
    assert attempt.ended_at - attempt.kept_since < timedelta(minutes=3) < KEEP
    assert any("the hard stop of the budget b is reached" in each.text for each in trace.events)


def test_a_gang_is_handed_on_more_than_once() -> None:
    jobs = tuple(
        SimSubmission(task=warm(120, name=f"job-{index}"), at_s=index * 400) for index in range(4)
    )
    ending = run_scenario(submissions=jobs)
    assert bought(ending) == 1
    assert [trace.attempts[0].adopted_at is not None for trace in ending.traces] == [
        False,
        True,
        True,
        True,
    ]


def test_of_two_jobs_that_race_for_a_kept_gang_one_gets_it() -> None:
    later = tuple(SimSubmission(task=task(name=name), at_s=LATER_S) for name in ("left", "right"))
    ending = run_scenario(submissions=(SimSubmission(task=warm()), *later))
    assert bought(ending) == 2
    assert sorted(trace.attempts[0].adopted_at is None for trace in ending.traces[1:]) == [
        False,
        True,
    ]


def test_a_gang_of_two_nodes_is_handed_on_whole() -> None:
    ending = two(warm(nodes=2), task(name="next", nodes=2))
    assert bought(ending) == 1
    assert {rank for _, rank, _, _ in ending.cloud.storage.work} == {0, 1}
    assert len(ending.cloud.storage.work) == 4


@pytest.mark.parametrize(
    "other",
    [
        {"project": "other"},
        {"nodes": 2},
        {"image": "ubuntu:24.04"},
        {"tags": {"team": "b"}},
        {"grace": timedelta(seconds=60)},
        {"resources": ResourceSpec(disk_gib=500)},
        {"resources": ResourceSpec(cpus_min=500)},
        {"resources": ResourceSpec(spot=SpotPolicy.ONLY)},
    ],
    ids=lambda other: next(iter(other)),
)
def test_a_job_that_needs_something_else_does_not_get_it(other: dict[str, object]) -> None:
    ending = two(warm(), task(name="next", **other), offers=(CHEAP, DEAR, SPOT))
    assert all(attempt.adopted_at is None for attempt in ending.traces[1].attempts)


def test_work_that_fails_by_its_exit_code_keeps_its_gang_too() -> None:
    ending = two(warm(env={"FAKE_EXIT_CODE": "3"}), task(name="next"))
    assert ending.traces[0].job.phase is JobPhase.FAILED
    assert ending.traces[0].job.exit_code == 3
    assert bought(ending) == 1


def test_nodes_that_were_lost_or_stopped_are_not_kept() -> None:
    lost = two(warm(), task(name="next"), launches=(FaultScript(lost_rank=0, lost_after_s=300),))
    assert lost.traces[0].attempts[0].outcome is AttemptOutcome.NODE
    assert lost.traces[0].attempts[0].kept_since is None
    stopped = run_scenario(
        warm(), interventions=(UserIntervention(action=UserAction.STOP, job=0, at_s=300),)
    )
    assert only(stopped).attempts[0].kept_since is None


def test_a_node_that_is_lost_while_it_is_kept_costs_the_next_job_nothing() -> None:
    ending = two(warm(), task(name="next"), launches=(FaultScript(lost_rank=0, lost_after_s=800),))
    assert ending.traces[1].job.phase is JobPhase.DONE
    assert ending.traces[1].attempts[0].adopted_at is None
    assert ending.traces[0].job.phase is JobPhase.DONE


def test_a_node_that_is_lost_after_it_was_taken_over_is_tried_again() -> None:
    ending = two(warm(), task(name="next"), launches=(FaultScript(lost_rank=0, lost_after_s=1200),))
    assert [attempt.outcome for attempt in ending.traces[1].attempts] == [
        AttemptOutcome.NODE,
        AttemptOutcome.SUCCEEDED,
    ]
    assert ending.traces[1].attempts[0].adopted_at is not None


def test_stopping_a_job_that_is_over_gives_its_gang_back() -> None:
    stop = UserIntervention(action=UserAction.STOP, job=0, at_s=700)
    trace = only(run_scenario(warm(), interventions=(stop,)))
    assert trace.job.phase is JobPhase.DONE
    assert spans(trace.charges, ChargeKind.KEPT) < timedelta(minutes=3)


def test_a_budget_pays_for_the_time_in_which_a_gang_is_kept_too() -> None:
    cap = Money(250_000)  # 15 minutes at one dollar per hour; the work takes ten and a half
    trace = only(run_scenario(warm(limits=JobLimits(budget=cap))))
    assert trace.job.phase is JobPhase.DONE
    assert (
        timedelta(minutes=2) < spans(trace.charges, ChargeKind.KEPT) < KEEP - timedelta(minutes=3)
    )


def test_the_server_may_die_at_any_step_while_a_gang_is_kept_and_handed_on() -> None:
    first, second = warm(30), task(60, name="next")
    calm = two(first, second, at_s=200)
    assert bought(calm) == 1
    for call in range(1, calm.calls + 1):
        for when in CrashMoment:
            ending = two(first, second, at_s=200, crashes=(ServerCrash(call=call, when=when),))
            assert [trace.job.phase for trace in ending.traces] == [JobPhase.DONE, JobPhase.DONE], (
                call,
                when,
            )


def test_a_server_that_stays_away_for_hours_gives_the_gang_back_when_it_returns() -> None:
    kept = []
    for call in range(24, 40):
        trace = only(run_scenario(warm(30), crashes=(ServerCrash(call=call, down_s=7200),)))
        assert trace.job.phase is JobPhase.DONE
        kept.append(spans(trace.charges, ChargeKind.KEPT))
    assert max(kept) > timedelta(hours=1), (
        "one of them died while the gang was kept: what the place bills is told"
    )


def test_writes_that_meet_a_newer_version_hand_a_gang_to_one_job_only() -> None:
    for stale in range(1, 40):
        ending = two(warm(30), task(60, name="next"), at_s=200, stale=frozenset({stale}))
        assert bought(ending) == 1, stale


def test_a_free_gang_can_be_kept_too() -> None:
    free = replace(CHEAP, rate=replace(CHEAP.rate, micros_per_hour=0))
    ending = run_scenario(
        submissions=(
            SimSubmission(task=warm()),
            SimSubmission(task=task(name="next"), at_s=LATER_S),
        ),
        offers=(free,),
    )
    assert bought(ending) == 1


@pytest.mark.parametrize(
    ("ordered", "full", "takes_over"),
    [(True, False, False), (True, True, True), (False, False, True)],
)
def test_a_kept_gang_of_a_later_wish_waits_for_what_comes_first_in_an_order(
    ordered: bool, full: bool, takes_over: bool
) -> None:
    """The first job keeps a cheap machine; the next would rather have the dear one, and that can
    be had or not.
    """
    dear = replace(DEAR, capacity=0 if full else None)
    wishes = (ResourceSpec(instance="dear"), ResourceSpec(instance="cheap"))
    either = replace(wishes[0], any_of=wishes, ordered=ordered)
    first, second = two(warm(), task(name="next", resources=either), offers=(CHEAP, dear)).traces
    assert first.attempts[0].offer.instance_type == "cheap"
    assert (second.attempts[0].adopted_at is not None) is takes_over
    assert second.attempts[0].offer.instance_type == ("cheap" if takes_over else "dear")

"""Budgets of projects on virtual time: nothing new starts, and what runs stops in time."""

from datetime import timedelta

import pytest
from tests.costs.sim.test_bills import make_story
from tests.sim.scenario_checks import tell

from cavvy.control.decide.bills import ACCRUE
from cavvy.domain.accounts import Project
from cavvy.domain.budgets import SpendingBudget
from cavvy.domain.jobs import JobPhase, StopCause
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.units import HourlyRate, Money
from cavvy.domain.values import replace
from cavvy.providers.fake.script import (
    CloudScript,
    FaultScript,
    PriceChange,
    RecordScript,
    RemovalScript,
)
from cavvy.sim.harness import START, play
from cavvy.sim.scenario import ScenarioResult, SimScenario, SimSubmission

RATE = 3_600_000  # 1000 micro-dollars a second


def run_with(
    budget: SpendingBudget,
    *at_s: float,
    rise_s: float = 10**9,
    end_s: float | None = None,
    project: str = "p",
    run_s: float = 20000,
) -> ScenarioResult:
    """Jobs of a project that are submitted at these times; the price rises tenfold once. The
    project p is below the project top.
    """
    story = make_story(0, RecordScript())
    offer = replace(story.script.offers[0], rate=HourlyRate(RATE), minimum_charge=timedelta(0))
    offer = replace(offer, capacity=None)
    rise = PriceChange(offer=offer.key, at_s=rise_s, rate=HourlyRate(10 * RATE))
    script = CloudScript(
        offers=(offer,),
        prices=(rise,),
        launches=(FaultScript(boot_s=2.0),),
        removals=(RemovalScript(takes_s=1.0),),
    )
    submissions = tuple(
        SimSubmission(
            task=TaskSpec(name="t", project=project, run="true", env={"FAKE_RUN_S": str(run_s)}),
            at_s=each,
        )
        for each in at_s
    )
    longest = timedelta(seconds=1600 + run_s)
    return play(
        SimScenario(
            submissions=submissions,
            script=script,
            projects=(Project(name="top"), Project(name="p", parent="top")),
            budgets=(budget,),
            budgets_end_s=end_s,
            longest=longest,
        )
    )


def spent_in(ending: ScenarioResult) -> int:
    return sum(charge.amount.micros for trace in ending.traces for charge in trace.charges)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.8, 0.99])
def test_a_tenfold_price_exceeds_a_hard_budget_by_at_most_one_metering_step(share: float) -> None:
    limit = 6_000_000  # what three jobs cost in 2000 s
    budget = SpendingBudget(
        name="b", limit=Money(limit), project="p", soft_percent=None, hard_percent=100, since=START
    )
    ending = run_with(budget, 0, 0, 60, rise_s=2000 * share)
    for trace in ending.traces:
        assert trace.job.stop_cause is StopCause.BUDGET, tell(trace)
        assert "the budget b" in trace.job.reason
    spent = spent_in(ending)
    step = 3 * HourlyRate(10 * RATE).over(ACCRUE).micros
    assert limit // 2 < spent <= limit + step


def test_a_hard_budget_is_used_to_the_end_if_prices_stay() -> None:
    budget = SpendingBudget(
        name="b", limit=Money(6_000_000), project="p", hard_percent=100, since=START
    )
    spent = spent_in(run_with(budget, 0, 0))
    assert 5_800_000 < spent <= 6_000_000


def test_jobs_of_a_hard_budget_that_is_removed_go_on() -> None:
    budget = SpendingBudget(
        name="b", limit=Money(6_000_000), project="p", hard_percent=100, since=START
    )
    (trace,) = run_with(budget, 0, end_s=1000).traces
    assert (trace.job.phase, len(trace.attempts)) == (JobPhase.DONE, 1), tell(trace)


def test_after_the_soft_share_nothing_new_starts_and_what_runs_goes_on() -> None:
    budget = SpendingBudget(
        name="b", limit=Money(6_000_000), project="p", soft_percent=50, since=START
    )
    # the whole budget is spent after 6000 s; one that waits is looked at every few seconds
    ending = run_with(budget, 0, 4000, run_s=6500)
    first, second = ending.traces
    assert first.job.phase is JobPhase.DONE, tell(first)
    assert (second.job.phase, second.attempts) == (JobPhase.QUEUED, [])
    assert "the budget b permits no new paid work" in second.job.reason
    alerts = [event.text for event in first.events if event.kind == "budget"]
    assert [text.split("%")[0] for text in alerts] == ["50", "80", "100"]


@pytest.mark.parametrize(
    ("budget_of", "project", "stopped"),
    [("top", "p", True), ("top", "top", True), ("p", "top", False)],
)
def test_a_budget_includes_the_projects_below_its_own(
    budget_of: str, project: str, stopped: bool
) -> None:
    budget = SpendingBudget(
        name="b", limit=Money(6_000_000), project=budget_of, hard_percent=100, since=START
    )
    (trace,) = run_with(budget, 0, project=project).traces
    assert (trace.job.stop_cause is StopCause.BUDGET) is stopped, tell(trace)


def test_other_projects_are_not_stopped() -> None:
    budget = SpendingBudget(
        name="b", limit=Money(1), project="other", hard_percent=100, since=START
    )
    (trace,) = run_with(budget, 0).traces
    assert trace.job.phase is JobPhase.DONE

"""The driver's accounts, checked by hand on drawn worlds, and promises that hold on random ones."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.simulation.spot_worlds import HOUR, market, random_world, terms, world

from cavvy.capabilities.simulation.traces.driver import PolicyFault, run_job
from cavvy.capabilities.simulation.traces.optimum import find_optimum
from cavvy.planner.spot.classic import POLICIES
from cavvy.planner.spot.view import JobTerms, MarketPolicy, PolicyDecision, PolicyView, RunMode


def test_a_job_on_steady_spot_pays_for_its_loading_and_its_work() -> None:
    made = world(market("#" * 20))
    run = run_job(made, 0.0, terms(made, 5, 15, 0.5), POLICIES["greedy"])
    assert run.usd == pytest.approx(0.3 * 5.5)
    assert run.end_s == pytest.approx(5.5 * HOUR)
    assert (run.missed, run.launches) == (False, 1)


def test_work_is_kept_and_loading_is_not_when_spot_is_taken_away() -> None:
    made = world(market("##..####" + "." * 20))
    run = run_job(made, 0.0, terms(made, 5, 20, 0.5), POLICIES["greedy"], keep_segments=True)
    assert [(one.mode, one.start_s / HOUR, one.end_s / HOUR) for one in run.segments] == [
        (RunMode.SPOT, 0.0, 2.0),
        (RunMode.IDLE, 2.0, 4.0),
        (RunMode.SPOT, 4.0, 8.0),
    ]
    assert run.segments[0].work_s == pytest.approx(1.5 * HOUR)
    assert run.segments[2].work_s == pytest.approx(3.5 * HOUR)
    assert run.usd == pytest.approx(0.3 * 6)


def test_on_demand_runs_from_the_last_safe_moment() -> None:
    made = world(market("." * 40))
    run = run_job(made, 0.0, terms(made, 5, 15, 0.5), POLICIES["greedy"], keep_segments=True)
    assert run.usd == pytest.approx(5.5)
    assert run.end_s == pytest.approx(15 * HOUR, abs=0.01)
    assert not run.missed


def test_a_job_that_only_takes_spot_may_miss_its_deadline() -> None:
    made = world(market("." * 10 + "#" * 10))
    run = run_job(made, 0.0, terms(made, 5, 8, 0.5), POLICIES["spot-only"])
    assert run.missed
    assert run.end_s == pytest.approx(15.5 * HOUR)


def test_windows_begin_anywhere() -> None:
    made = world(market("...####" + "." * 20))
    run = run_job(made, 3.5 * HOUR, terms(made, 2, 10, 0.0), POLICIES["greedy"])
    assert run.usd == pytest.approx(0.6)
    assert run.end_s == pytest.approx(2 * HOUR)


def test_a_move_between_regions_is_paid_once() -> None:
    moves = ((0.0, 7.0), (7.0, 0.0))
    made = world(
        market("##" + "." * 30, name="a-1a", region="a-1"),
        market("..##############" + "." * 16, name="b-1a", region="b-1"),
        moves=moves,
    )
    run = run_job(made, 0.0, terms(made, 5, 20, 0.0), POLICIES["greedy"])
    assert run.usd == pytest.approx(0.3 * 5 + 7.0)


class Wrong(MarketPolicy):
    """Answers the same whatever it is asked."""

    def __init__(self, answer: PolicyDecision) -> None:
        self._answer = answer

    def decide(self, view: PolicyView) -> PolicyDecision:
        return self._answer


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (PolicyDecision(RunMode.SPOT, 0), "has no spot capacity"),
        (PolicyDecision(RunMode.IDLE, 0, 0.0), "not after the current time"),
    ],
)
def test_a_policy_that_answers_nonsense_is_told_so(answer: PolicyDecision, words: str) -> None:
    made = world(market("." * 10))
    with pytest.raises(PolicyFault, match=words):
        run_job(made, 0.0, terms(made, 5, 9, 0.5), lambda _: Wrong(answer))


def test_a_job_that_waits_when_the_record_ends_has_missed_its_deadline() -> None:
    made = world(market("##" + "." * 10))
    run = run_job(made, 0.0, terms(made, 5, 9, 0.5), POLICIES["spot-only"], keep_segments=True)
    assert (run.missed, run.end_s) == (True, made.end_s)
    assert run.usd == pytest.approx(0.6)
    assert [segment.mode for segment in run.segments] == [RunMode.SPOT, RunMode.IDLE]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    markets=st.integers(1, 4),
    work=st.integers(1, 40),
    slack=st.floats(0.0, 1.5),
    overhead=st.sampled_from([0.0, 1 / 6, 0.5, 1.0]),
    name=st.sampled_from(["auto", "uniform-progress", "greedy", "on-demand"]),
)
def test_no_deadline_is_missed_and_no_run_beats_the_optimum(
    seed: int, markets: int, work: int, slack: float, overhead: float, name: str
) -> None:
    made = random_world(seed, markets)
    hours = round((work * (1 + slack) + overhead) * 6 + 1) / 6
    job = terms(made, work, min(hours, 60), overhead)
    run = run_job(made, 0.0, job, POLICIES[name], keep_segments=True)
    assert not run.missed
    assert run.usd >= find_optimum(made, 0.0, job) - 1e-6
    assert sum(one.work_s for one in run.segments) == pytest.approx(job.work_s)
    assert sum(one.usd for one in run.segments) == pytest.approx(run.usd)


def test_terms_without_moves_move_for_nothing() -> None:
    assert JobTerms(work_s=1, deadline_s=2, overhead_s=0, markets=()).move(0, 1) == 0.0

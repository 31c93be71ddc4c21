"""What each rule of the deadline policy makes of a decision at its exact limits."""

from math import inf

import pytest
from tests.planner.unit.test_deadline_rules import Says

from cavvy.planner.deadline.policy import (
    PolicyQuestion,
    Rule,
    ahead,
    cheaper,
    free_moves_now,
    last_moment,
    not_dearer,
    within_budget,
)
from cavvy.planner.spot.view import (
    ABOUT,
    NOWHERE,
    JobTerms,
    PolicyDecision,
    PolicyMarket,
    PolicyView,
    RunMode,
    SpotQuote,
)

IDLE, SPOT, ON_DEMAND = RunMode.IDLE, RunMode.SPOT, RunMode.ON_DEMAND
HOUR_S = 3600.0
AGAIN_S = 100.0
DEADLINE_S = 100 * HOUR_S


def question(
    mode: RunMode,
    market: int = 0,
    *,
    slack_s: float = 50 * HOUR_S,
    fixed: tuple[float, ...] = (1.0, 1.0, 1.0),
    spot: tuple[float, ...] = (0.5, 0.5, 0.5),
    move_usd: float = 0.0,
    at_risk: bool = False,
    loading_s: float = 0.0,
    unsaved_s: float = 0.0,
    budget_usd: float = inf,
) -> PolicyQuestion:
    """A job with an hour of work and an hour of overhead left. A negative price of spot: not up."""
    terms = JobTerms(
        work_s=HOUR_S,
        deadline_s=DEADLINE_S,
        overhead_s=HOUR_S,
        again_s=AGAIN_S,
        markets=tuple(PolicyMarket(name="m", on_demand_usd_hr=each) for each in fixed),
        move_usd=tuple(tuple(move_usd * (a != b) for b in range(3)) for a in range(3)),
    )
    seen = PolicyView(
        now_s=DEADLINE_S - HOUR_S - slack_s,
        left_s=HOUR_S,
        mode=mode,
        market=market,
        loading_s=loading_s,
        quotes=tuple(SpotQuote(each >= 0, abs(each), at_risk) for each in spot),
        unsaved_s=unsaved_s,
        budget_usd=budget_usd,
    )
    return PolicyQuestion(terms, seen, Says(PolicyDecision(IDLE, 0)))


SPOT_NEEDS_S = 2 * HOUR_S + AGAIN_S
FREE = (-1.0, ABOUT, 9.0)  # spot is in other markets only
CHEAP = (1.0, 1.0, 0.475)  # two hours in the last market cost 95 % of an hour in the others

Case = tuple[Rule, PolicyQuestion, tuple[RunMode, int], tuple[RunMode, int]]
CASES: list[Case] = [
    (last_moment, question(SPOT, slack_s=1, unsaved_s=AGAIN_S), (SPOT, 0), (SPOT, 0)),
    (last_moment, question(SPOT, slack_s=1, unsaved_s=AGAIN_S + 1), (SPOT, 0), (ON_DEMAND, 0)),
    (last_moment, question(SPOT, slack_s=HOUR_S, loading_s=9), (SPOT, 0), (ON_DEMAND, 0)),
    (last_moment, question(SPOT, slack_s=HOUR_S + 1, loading_s=9), (SPOT, 0), (SPOT, 0)),
    (free_moves_now, question(IDLE, spot=FREE), (IDLE, 0), (SPOT, 1)),
    (free_moves_now, question(IDLE, spot=(-1.0, 1.2, 9.0)), (IDLE, 0), (IDLE, 0)),
    (free_moves_now, question(IDLE, move_usd=0.01, spot=FREE), (IDLE, 0), (IDLE, 0)),
    (free_moves_now, question(IDLE, NOWHERE, spot=FREE), (IDLE, 0), (IDLE, 0)),
    (free_moves_now, question(ON_DEMAND, spot=FREE), (IDLE, 0), (IDLE, 0)),
    (free_moves_now, question(ON_DEMAND, spot=FREE), (ON_DEMAND, 0), (ON_DEMAND, 0)),
    (free_moves_now, question(IDLE, spot=FREE), (ON_DEMAND, 0), (ON_DEMAND, 0)),
    (free_moves_now, question(IDLE, slack_s=SPOT_NEEDS_S, spot=FREE), (IDLE, 0), (SPOT, 1)),
    (free_moves_now, question(IDLE, slack_s=SPOT_NEEDS_S - 1, spot=FREE), (IDLE, 0), (IDLE, 0)),
    (not_dearer, question(IDLE, spot=(2.0, 2.0, 1.0)), (IDLE, 0), (ON_DEMAND, 0)),
    (not_dearer, question(IDLE, spot=(2.0, 2.0, 0.9)), (IDLE, 0), (IDLE, 0)),
    (not_dearer, question(SPOT, spot=(2.0, 2.0, 2.0)), (SPOT, 0), (SPOT, 0)),
    (not_dearer, question(SPOT, spot=(2.0, 2.0, 2.0)), (IDLE, 0), (IDLE, 0)),
    # a gang on demand is compared with its own market, a job without a gang with the cheapest
    (
        not_dearer,
        question(ON_DEMAND, 1, fixed=(1.0, 3.0, 9.0), spot=(2.0, 2.0, 2.0)),
        (IDLE, 1),
        (IDLE, 1),
    ),
    (
        not_dearer,
        question(IDLE, 1, fixed=(1.0, 3.0, 9.0), spot=(2.0, 2.0, 2.0)),
        (IDLE, 1),
        (ON_DEMAND, 0),
    ),
    (ahead, question(SPOT, at_risk=True), (SPOT, 0), (SPOT, 1)),
    (ahead, question(SPOT, at_risk=True), (SPOT, 2), (SPOT, 2)),
    (cheaper, question(ON_DEMAND, fixed=CHEAP), (ON_DEMAND, 0), (ON_DEMAND, 2)),
    (cheaper, question(ON_DEMAND, fixed=(1.0, 1.0, 0.476)), (ON_DEMAND, 0), (ON_DEMAND, 0)),
    (cheaper, question(ON_DEMAND, fixed=CHEAP), (ON_DEMAND, 1), (ON_DEMAND, 1)),
    (cheaper, question(ON_DEMAND, fixed=CHEAP, slack_s=HOUR_S), (ON_DEMAND, 0), (ON_DEMAND, 2)),
    (within_budget, question(IDLE, budget_usd=2.0), (ON_DEMAND, 0), (ON_DEMAND, 0)),
    (within_budget, question(IDLE, budget_usd=1.9), (ON_DEMAND, 0), (SPOT, 0)),
    (within_budget, question(IDLE, budget_usd=1.0), (ON_DEMAND, 0), (SPOT, 0)),
    (within_budget, question(IDLE, budget_usd=0.9), (ON_DEMAND, 0), (ON_DEMAND, 0)),
    (within_budget, question(IDLE, budget_usd=1.0), (SPOT, 1), (SPOT, 1)),
    (within_budget, question(IDLE, budget_usd=inf), (ON_DEMAND, 1), (ON_DEMAND, 1)),
    # a gang that stays needs no other start
    (within_budget, question(ON_DEMAND, budget_usd=1.0), (ON_DEMAND, 0), (ON_DEMAND, 0)),
    (within_budget, question(ON_DEMAND, budget_usd=1.0), (ON_DEMAND, 1), (SPOT, 0)),
    (within_budget, question(IDLE, budget_usd=1.5), (ON_DEMAND, 0), (SPOT, 0)),
]


@pytest.mark.parametrize(("rule", "asked", "decided", "wanted"), CASES)
def test_each_rule_at_its_limits(
    rule: Rule,
    asked: PolicyQuestion,
    decided: tuple[RunMode, int],
    wanted: tuple[RunMode, int],
) -> None:
    decision = rule(asked, PolicyDecision(*decided))
    assert (decision.mode, decision.market) == wanted

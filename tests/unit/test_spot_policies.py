"""Single decisions of the deadline policies."""

import pytest

from remuda.planner.spot.auto import Auto
from remuda.planner.spot.policies import POLICIES, find_policy
from remuda.planner.spot.view import NOWHERE, Market, Mode, PolicyMaker, Quote, Terms, View

HOUR = 3600.0
TERMS = Terms(work_s=10 * HOUR, deadline_s=15 * HOUR, overhead_s=0.5 * HOUR, markets=(Market(name="a"),))


def view(now: float, left: float, mode: Mode, up: bool, *, usd_hr: float = 0.3, loading: float = 0.0) -> View:
    market = NOWHERE if mode is Mode.IDLE and left == 10 else 0
    return View(now * HOUR, left * HOUR, mode, market, loading * HOUR, (Quote(up, usd_hr),))


@pytest.mark.parametrize("make", [POLICIES["auto"], POLICIES["greedy"], POLICIES["uniform-progress"]])
def test_spot_that_is_there_is_taken_and_kept(make: PolicyMaker) -> None:
    policy = make(TERMS)
    assert policy.decide(view(0, 10, Mode.IDLE, True))[:2] == (Mode.SPOT, 0)
    assert policy.decide(view(2, 8.5, Mode.SPOT, True)).mode is Mode.SPOT


@pytest.mark.parametrize("make", [POLICIES["auto"], POLICIES["greedy"], POLICIES["uniform-progress"]])
def test_the_last_safe_moment_goes_on_demand(make: PolicyMaker) -> None:
    assert make(TERMS).decide(view(4.5, 10, Mode.IDLE, False)).mode is Mode.ON_DEMAND
    assert make(TERMS).decide(view(4.2, 10, Mode.IDLE, True)).mode is Mode.ON_DEMAND  # starting on spot is not safe


def test_greedy_asks_again_at_the_last_safe_moment() -> None:
    decision = POLICIES["greedy"](TERMS).decide(view(1, 10, Mode.IDLE, False))
    assert decision.mode is Mode.IDLE
    assert decision.again_s == pytest.approx(4.5 * HOUR)


def test_uniform_progress_keeps_the_even_pace() -> None:
    policy = POLICIES["uniform-progress"](TERMS)
    assert policy.decide(view(3, 8.5, Mode.IDLE, False)).mode is Mode.ON_DEMAND  # 1.5 h done, 2 h due
    ahead = policy.decide(view(3, 7, Mode.IDLE, False))  # 3 h done
    assert ahead.mode is Mode.IDLE
    assert ahead.again_s == pytest.approx(4.5 * HOUR)
    behind = policy.decide(view(3, 7.5, Mode.ON_DEMAND, True))  # 2.5 h done, (3 + 1) x 2/3 due with two overheads
    assert behind.mode is Mode.ON_DEMAND
    assert behind.again_s == pytest.approx((3 + (4 * 2 / 3 - 2.5) * 3) * HOUR)
    assert policy.decide(view(3, 7.2, Mode.ON_DEMAND, True)).mode is Mode.SPOT


def test_auto_waits_with_slack_and_not_without() -> None:
    ample = Terms(work_s=1 * HOUR, deadline_s=100 * HOUR, overhead_s=0.1 * HOUR, markets=(Market(name="a"),))
    decision = Auto(ample).decide(view(0, 1, Mode.IDLE, False))
    assert decision.mode is Mode.IDLE
    assert decision.again_s > 0
    tight = Terms(work_s=40 * HOUR, deadline_s=41 * HOUR, overhead_s=0.1 * HOUR, markets=(Market(name="a"),))
    assert Auto(tight).decide(view(0, 40, Mode.IDLE, False)).mode is Mode.ON_DEMAND


def test_auto_leaves_spot_that_becomes_dearer_than_on_demand() -> None:
    policy = Auto(TERMS)
    policy.decide(view(0, 10, Mode.IDLE, True))
    assert policy.decide(view(1, 9.5, Mode.SPOT, True, usd_hr=1.5)).mode is Mode.ON_DEMAND
    assert Auto(TERMS).decide(view(0, 10, Mode.IDLE, True, usd_hr=1.5)).mode is not Mode.SPOT


def test_auto_begins_in_the_cheapest_market_with_spot() -> None:
    markets = (Market(name="a"), Market(name="b"), Market(name="c"))
    terms = Terms(work_s=10 * HOUR, deadline_s=30 * HOUR, overhead_s=0.1 * HOUR, markets=markets)
    quotes = (Quote(False, 0.1), Quote(True, 0.4), Quote(True, 0.3))
    assert Auto(terms).decide(View(0.0, 10 * HOUR, Mode.IDLE, NOWHERE, 0.0, quotes))[:2] == (Mode.SPOT, 2)


def test_every_decision_says_why() -> None:
    for make in POLICIES.values():
        assert make(TERMS).decide(view(0, 10, Mode.IDLE, True)).reason


def test_policies_are_found_by_their_names_and_aliases() -> None:
    assert find_policy("up") is POLICIES["uniform-progress"]
    with pytest.raises(KeyError):
        find_policy("none")

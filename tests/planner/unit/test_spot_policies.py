"""Single decisions of the deadline policies."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cavvy.domain.values import replace
from cavvy.planner.spot.auto import AutoPolicy
from cavvy.planner.spot.classic import POLICIES, find_policy
from cavvy.planner.spot.view import (
    GRAIN_S,
    NOWHERE,
    UNSEEN,
    JobTerms,
    PolicyDecision,
    PolicyMaker,
    PolicyMarket,
    PolicyView,
    RunMode,
    SpotQuote,
)

HOUR = 3600.0
TERMS = JobTerms(
    work_s=10 * HOUR, deadline_s=15 * HOUR, overhead_s=0.5 * HOUR, markets=(PolicyMarket(name="a"),)
)


def view(
    now: float, left: float, mode: RunMode, up: bool, *, usd_hr: float = 0.3, loading: float = 0.0
) -> PolicyView:
    market = NOWHERE if mode is RunMode.IDLE and left == 10 else 0
    return PolicyView(
        now * HOUR, left * HOUR, mode, market, loading * HOUR, (SpotQuote(up, usd_hr),)
    )


@pytest.mark.parametrize(
    "make", [POLICIES["auto"], POLICIES["greedy"], POLICIES["uniform-progress"]]
)
def test_spot_that_is_there_is_taken_and_kept(make: PolicyMaker) -> None:
    policy = make(TERMS)
    assert policy.decide(view(0, 10, RunMode.IDLE, True))[:2] == (RunMode.SPOT, 0)
    assert policy.decide(view(2, 8.5, RunMode.SPOT, True)).mode is RunMode.SPOT


@pytest.mark.parametrize(
    "make", [POLICIES["auto"], POLICIES["greedy"], POLICIES["uniform-progress"]]
)
def test_the_last_safe_moment_goes_on_demand(make: PolicyMaker) -> None:
    assert make(TERMS).decide(view(4.5, 10, RunMode.IDLE, False)).mode is RunMode.ON_DEMAND
    assert (
        make(TERMS).decide(view(4.2, 10, RunMode.IDLE, True)).mode is RunMode.ON_DEMAND
    )  # starting on spot is not safe


def test_greedy_asks_again_at_the_last_safe_moment() -> None:
    decision = POLICIES["greedy"](TERMS).decide(view(1, 10, RunMode.IDLE, False))
    assert decision.mode is RunMode.IDLE
    assert decision.again_s == pytest.approx(4.5 * HOUR)


def test_uniform_progress_keeps_the_even_pace() -> None:
    policy = POLICIES["uniform-progress"](TERMS)
    assert (
        policy.decide(view(3, 8.5, RunMode.IDLE, False)).mode is RunMode.ON_DEMAND
    )  # 1.5 h done, 2 h due
    ahead = policy.decide(view(3, 7, RunMode.IDLE, False))  # 3 h done
    assert ahead.mode is RunMode.IDLE
    assert ahead.again_s == pytest.approx(4.5 * HOUR)
    behind = policy.decide(
        view(3, 7.5, RunMode.ON_DEMAND, True)
    )  # 2.5 h done, (3 + 1) x 2/3 due with two overheads
    assert behind.mode is RunMode.ON_DEMAND
    assert behind.again_s == pytest.approx((3 + (4 * 2 / 3 - 2.5) * 3) * HOUR)
    assert policy.decide(view(3, 7.2, RunMode.ON_DEMAND, True)).mode is RunMode.SPOT


def test_auto_waits_with_slack_and_not_without() -> None:
    ample = JobTerms(
        work_s=1 * HOUR,
        deadline_s=100 * HOUR,
        overhead_s=0.1 * HOUR,
        markets=(PolicyMarket(name="a"),),
    )
    decision = AutoPolicy(ample).decide(view(0, 1, RunMode.IDLE, False))
    assert decision.mode is RunMode.IDLE
    assert decision.again_s > 0
    tight = JobTerms(
        work_s=40 * HOUR,
        deadline_s=41 * HOUR,
        overhead_s=0.1 * HOUR,
        markets=(PolicyMarket(name="a"),),
    )
    assert AutoPolicy(tight).decide(view(0, 40, RunMode.IDLE, False)).mode is RunMode.ON_DEMAND


def test_auto_leaves_spot_that_becomes_dearer_than_on_demand() -> None:
    policy = AutoPolicy(TERMS)
    policy.decide(view(0, 10, RunMode.IDLE, True))
    assert policy.decide(view(1, 9.5, RunMode.SPOT, True, usd_hr=1.5)).mode is RunMode.ON_DEMAND
    assert (
        AutoPolicy(TERMS).decide(view(0, 10, RunMode.IDLE, True, usd_hr=1.5)).mode
        is not RunMode.SPOT
    )


def test_auto_begins_in_the_cheapest_market_with_spot() -> None:
    markets = (PolicyMarket(name="a"), PolicyMarket(name="b"), PolicyMarket(name="c"))
    terms = JobTerms(work_s=10 * HOUR, deadline_s=30 * HOUR, overhead_s=0.1 * HOUR, markets=markets)
    quotes = (SpotQuote(False, 0.1), SpotQuote(True, 0.4), SpotQuote(True, 0.3))
    assert AutoPolicy(terms).decide(PolicyView(0.0, 10 * HOUR, RunMode.IDLE, NOWHERE, 0.0, quotes))[
        :2
    ] == (
        RunMode.SPOT,
        2,
    )


def test_every_decision_says_why() -> None:
    for make in POLICIES.values():
        assert make(TERMS).decide(view(0, 10, RunMode.IDLE, True)).reason


def test_policies_are_found_by_their_names_and_aliases() -> None:
    assert find_policy("up") is POLICIES["uniform-progress"]
    with pytest.raises(KeyError):
        find_policy("none")


@pytest.mark.parametrize(
    ("now", "mode", "up", "expected"),
    [
        (4.49, RunMode.ON_DEMAND, False, RunMode.ON_DEMAND),
        (
            4.5,
            RunMode.ON_DEMAND,
            True,
            RunMode.ON_DEMAND,
        ),  # a way back to spot takes half an hour, and so does the way out
        (4.01, RunMode.ON_DEMAND, True, RunMode.ON_DEMAND),
        (3.99, RunMode.IDLE, True, RunMode.SPOT),
        (4.01, RunMode.IDLE, True, RunMode.ON_DEMAND),
        (4.5, RunMode.IDLE, False, RunMode.ON_DEMAND),
        (
            6.0,
            RunMode.SPOT,
            True,
            RunMode.SPOT,
        ),  # it is there already, and lasts as long as it does
    ],
)
def test_auto_changes_to_spot_only_with_time_to_leave_it_again(
    now: float, mode: RunMode, up: bool, expected: RunMode
) -> None:
    policy = AutoPolicy(TERMS)
    policy.learn(-100 * HOUR, [SpotQuote(up, 0.3)])  # as it has been for long
    assert policy.decide(view(now, 10, mode, up)).mode is expected


def test_auto_gives_spot_up_for_its_price_only_where_that_pays_for_the_change() -> None:
    """Half an hour of overhead at a dollar: so much has to be saved on the work that is left."""
    for usd_hr, mode in ((1.04, RunMode.SPOT), (1.06, RunMode.ON_DEMAND)):
        assert AutoPolicy(TERMS).decide(view(1, 10, RunMode.SPOT, True, usd_hr=usd_hr)).mode is mode
    late = view(4.6, 10, RunMode.SPOT, True, usd_hr=1.06)
    assert AutoPolicy(TERMS).decide(late).mode is RunMode.SPOT, "no time is left for the change"


def test_auto_in_several_markets_goes_on_demand_where_it_costs_least() -> None:
    markets = (
        PolicyMarket(name="a", on_demand_usd_hr=1.0),
        PolicyMarket(name="b", on_demand_usd_hr=0.9),
        PolicyMarket(name="c"),
    )
    terms = JobTerms(work_s=10 * HOUR, deadline_s=11 * HOUR, overhead_s=0.5 * HOUR, markets=markets)
    quotes = (SpotQuote(False, 0.3),) * 3
    late = PolicyView(0.6 * HOUR, 10 * HOUR, RunMode.IDLE, 0, 0.0, quotes)
    assert AutoPolicy(terms).decide(late)[:2] == (RunMode.ON_DEMAND, 1)
    moves = ((0.0, 2.0, 0.0), (2.0, 0.0, 2.0), (0.0, 2.0, 0.0))
    far = JobTerms(
        work_s=10 * HOUR,
        deadline_s=11 * HOUR,
        overhead_s=0.5 * HOUR,
        markets=markets,
        move_usd=moves,
    )
    assert AutoPolicy(far).decide(late)[:2] == (RunMode.ON_DEMAND, 0), (
        "the checkpoint's way there is paid too"
    )


moments = st.tuples(st.floats(0.05, 3), st.booleans(), st.booleans(), st.floats(0.1, 1.2))


@given(
    st.integers(1, 2),
    st.floats(0.5, 10),
    st.sampled_from(RunMode),
    st.lists(moments, min_size=1, max_size=8),
)
def test_auto_never_waits_beyond_the_last_safe_moment(
    count: int, left: float, mode: RunMode, seen: list[tuple[float, bool, bool, float]]
) -> None:
    """Whatever it has learned: what it decides always leaves the time to start once on demand
    and do all the work.
    """
    markets = tuple(PolicyMarket(name=name) for name in "ab"[:count])
    terms = JobTerms(work_s=10 * HOUR, deadline_s=15 * HOUR, overhead_s=0.5 * HOUR, markets=markets)
    policy, now = AutoPolicy(terms), 0.0
    for passed, *up, usd_hr in seen:
        now += passed
        quotes = tuple(SpotQuote(bool(there), float(usd_hr)) for there in up[:count])
        decision = policy.decide(PolicyView(now * HOUR, left * HOUR, mode, 0, 0.0, quotes))
        last_s = terms.deadline_s - left * HOUR - terms.overhead_s
        if mode is not RunMode.SPOT and now * HOUR >= last_s:
            assert decision.mode is RunMode.ON_DEMAND
        if decision.mode is RunMode.IDLE and mode is not RunMode.SPOT:
            assert decision.again_s <= last_s + GRAIN_S
            assert decision.again_s > now * HOUR
        if decision.mode is RunMode.SPOT and (mode is not RunMode.SPOT or decision.market != 0):
            assert now * HOUR <= last_s - terms.overhead_s + GRAIN_S


def practised(
    slack: float, mode: RunMode, *up: bool, overhead: float, away: float, stays: float
) -> tuple[RunMode, float]:
    """What `auto` does where spot always came back so soon, with 18 minutes of work left; and when
    again, in hours before the last moment at which on-demand can still do all of it.
    """
    markets = tuple(PolicyMarket(name=name) for name in "ab"[: len(up)])
    terms = JobTerms(
        work_s=10 * HOUR, deadline_s=15 * HOUR, overhead_s=overhead * HOUR, markets=markets
    )
    policy, now, cycle = AutoPolicy(terms), 14.7 - slack, away + stays
    for number in range(-40, 0):
        for at, there in ((0.0, True), (stays, False)):
            policy.learn((now + cycle * number + at) * HOUR, [SpotQuote(there, 0.5)] * len(up))
    quotes = tuple(SpotQuote(there, 0.5) for there in up)
    decision = policy.decide(PolicyView(now * HOUR, 0.3 * HOUR, mode, 0, 0.0, quotes))
    return decision.mode, 14.7 - overhead - decision.again_s / HOUR


def test_auto_waits_for_what_always_came_back_no_longer_than_is_safe() -> None:
    mode, left = practised(0.38, RunMode.IDLE, False, overhead=0.2, away=0.2, stays=20)
    assert (mode, left) == (RunMode.IDLE, pytest.approx(0, abs=1e-6))
    assert (
        practised(0.2, RunMode.IDLE, False, overhead=0.2, away=0.2, stays=20)[0]
        is RunMode.ON_DEMAND
    )


@pytest.mark.parametrize("mode", [RunMode.IDLE, RunMode.ON_DEMAND])
@pytest.mark.parametrize("up", [(True, True), (False, True), (True, False)])
def test_auto_starts_on_no_spot_that_leaves_too_little_time(
    mode: RunMode, up: tuple[bool, bool]
) -> None:
    assert practised(1.9, mode, *up, overhead=1.0, away=0.02, stays=50)[0] is not RunMode.SPOT


def test_working_spot_is_left_only_for_spot_that_has_lasted_for_two_launches() -> None:
    """Spot in the other market costs a third; it has just returned, then it has lasted."""
    markets = (PolicyMarket(name="a"), PolicyMarket(name="b"))
    terms = JobTerms(work_s=20 * HOUR, deadline_s=40 * HOUR, overhead_s=0.5 * HOUR, markets=markets)
    policy = AutoPolicy(terms)
    here, gone, there = SpotQuote(True, 0.6), SpotQuote(False, 0.2), SpotQuote(True, 0.2)
    policy.learn(0.0, (here, gone))
    policy.learn(4 * HOUR, (here, there))

    def chosen(hours: float) -> int:
        seen = PolicyView(hours * HOUR, 16 * HOUR, RunMode.SPOT, 0, 0.0, (here, there))
        return policy.decide(seen).market

    assert [chosen(hours) for hours in (4.1, 4.9, 5.1)] == [0, 0, 1]


@pytest.mark.parametrize(("usd_hr", "market"), [(0.56, 0), (0.53, 1)])
def test_working_spot_is_left_for_spot_that_is_assumed_only_at_a_lower_price(
    usd_hr: float, market: int
) -> None:
    """The other market refused five hours ago, and may have spot again."""
    markets = (PolicyMarket(name="a"), PolicyMarket(name="b"))
    terms = JobTerms(work_s=20 * HOUR, deadline_s=40 * HOUR, overhead_s=0.1 * HOUR, markets=markets)
    policy = AutoPolicy(terms)
    here, gone = SpotQuote(True, 0.6, since_s=0.0), SpotQuote(False, usd_hr, since_s=0.0)
    policy.learn(0.0, (here, gone))
    assumed = SpotQuote(True, usd_hr, since_s=3.75 * HOUR)
    seen = PolicyView(5 * HOUR, 16 * HOUR, RunMode.SPOT, 0, 0.0, (here, assumed))
    assert policy.decide(seen).market == market


def test_auto_leaves_on_demand_only_for_spot_that_has_lasted_in_every_market() -> None:
    terms = JobTerms(
        work_s=40 * HOUR,
        deadline_s=43 * HOUR,
        overhead_s=0.2 * HOUR,
        markets=(PolicyMarket(name="a"), PolicyMarket(name="b")),
    )

    def ask(hours_with_spot: float) -> PolicyDecision:
        policy = AutoPolicy(terms)
        policy.learn(0.0, (SpotQuote(False, 0.3), SpotQuote(False, 0.3)))
        there = (SpotQuote(False, 0.3), SpotQuote(True, 0.6))
        policy.learn(2 * HOUR, there)
        now, left = 2 + hours_with_spot, 40 - 1.8 - hours_with_spot
        return policy.decide(PolicyView(now * HOUR, left * HOUR, RunMode.ON_DEMAND, 0, 0.0, there))

    just = ask(0.0)
    assert just.mode is RunMode.ON_DEMAND
    assert 2 * HOUR < just.again_s <= 2.5 * HOUR
    assert ask(3.0)[:2] == (RunMode.SPOT, 1)


@pytest.mark.parametrize(("left", "expected"), [(9, RunMode.SPOT), (2, RunMode.ON_DEMAND)])
def test_auto_leaves_on_demand_only_if_the_rest_of_the_work_pays(
    left: float, expected: RunMode
) -> None:
    policy = AutoPolicy(replace(TERMS, overhead_s=0.2 * HOUR, deadline_s=100 * HOUR))
    policy.learn(-24 * HOUR, (SpotQuote(True, 0.95),))
    assert policy.decide(view(1, left, RunMode.ON_DEMAND, True, usd_hr=0.95)).mode is expected


@pytest.mark.parametrize("slack_hr", [3.0, 5.0, 8.0])
def test_slack_is_not_spent_on_a_slightly_cheaper_market_whose_spells_are_short(
    slack_hr: float,
) -> None:
    """The other market with the lowest price has no spot either. The next one costs a third more
    and was never tried.
    """
    markets = tuple(PolicyMarket(name=name) for name in "abcdefgh")
    moves = tuple(tuple(0.01 * (a != b) for b in markets) for a in markets)
    terms = JobTerms(
        work_s=43 * HOUR,
        deadline_s=51 * HOUR,
        overhead_s=720.0,
        markets=markets,
        move_usd=moves,
    )
    others = (SpotQuote(False, 0.17), *[SpotQuote(True, 0.22, since_s=UNSEEN)] * 6)
    policy, began = AutoPolicy(terms), 51 * HOUR - (slack_hr + 41) * HOUR
    for number in range(6):
        quote = SpotQuote(number % 2 == 0, 0.17)
        policy.learn(began - (5 - number) * 0.4 * HOUR, (quote, *others))
    now, decision = began, PolicyDecision(RunMode.IDLE, 0)
    while decision.mode is RunMode.IDLE:
        quotes = (SpotQuote(False, 0.17), *others)
        decision = policy.decide(PolicyView(now, 41 * HOUR, RunMode.IDLE, 0, 0.0, quotes))
        waited, now = now - began, decision.again_s
    assert decision.mode is RunMode.SPOT
    assert waited < 0.5 * HOUR

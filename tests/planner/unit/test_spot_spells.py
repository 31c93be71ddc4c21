"""What is learned of spells of spot, and the thresholds made of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cavvy.planner.spot.cycle import CycleProblem, find_price, plan_cycle, plan_trust, plan_wait
from cavvy.planner.spot.spells import SpellLengths


def seen(*lengths: float, times: int = 200) -> SpellLengths:
    """Spells so often seen that the prior hardly counts."""
    spells = SpellLengths()
    for length in lengths:
        for _ in range(times):
            spells = spells.with_one(length)
    return spells


def test_sums_are_those_of_the_lengths() -> None:
    spells = seen(1.0, 3.0, times=400)
    assert spells.mean == pytest.approx(2.0, abs=0.1)
    sums = spells.sums
    at = sums.lengths.index(1.0) + 399  # the last of the ones
    assert sums.longer[at] == pytest.approx(0.5, abs=0.05)
    assert sums.waited[at] == pytest.approx(1.0, abs=0.05)


def test_within_a_long_spell_only_longer_ones_remain() -> None:
    assert seen(1.0, 3.0, times=400).beyond(2.0).mean == pytest.approx(1.0, abs=0.4)


def test_a_spell_longer_than_any_goes_on_in_proportion_to_its_age() -> None:
    spells = SpellLengths()
    assert spells.beyond(200.0).mean == pytest.approx(400.0)
    assert spells.beyond(400.0).mean > spells.beyond(200.0).mean


def test_a_few_spells_outweigh_the_light_prior() -> None:
    spells = seen(0.25, times=3)
    expected, _ = spells.within(0.0, 10.0)
    assert spells.trusting_seen().within(0.0, 10.0)[0] < 0.6 * expected
    assert SpellLengths().trusting_seen().mean == SpellLengths().mean


def test_the_prior_expects_spells_that_have_lasted_to_last() -> None:
    spells = SpellLengths()
    assert spells.beyond(0.5).mean < spells.beyond(2.0).mean < spells.beyond(8.0).mean


def test_patience_grows_as_slack_gets_cheaper() -> None:
    away = seen(0.5, 8.0)
    dear, cheap = plan_wait(away, 1.0, 2.0, 0.0), plan_wait(away, 0.001, 2.0, 0.0)
    assert dear.patience == pytest.approx(0.5)  # sit out the short ones, never the long ones
    assert cheap.patience > 8.0
    assert plan_wait(away, 0.0, 0.4, 0.0).patience == float("inf")
    assert dear.cost > cheap.cost


def test_certain_long_absences_are_not_waited_for() -> None:
    assert plan_wait(seen(10.0, times=400), 1.0, 0.2, 0.0).patience == 0.0


def test_spot_is_trusted_after_the_short_spells_have_ended() -> None:
    stays = seen(0.2, 10.0)
    threshold, gain, reached, hours = plan_trust(stays, saving=0.7, entry=3.0)
    assert 0.2 <= threshold < 10.0
    assert gain > 0
    assert 0.3 < reached < 0.6
    assert hours > 3
    assert plan_trust(stays, saving=0.7, entry=100.0)[0] == float("inf")
    assert plan_trust(stays, saving=0.7, entry=0.0)[0] == 0.0


def test_plenty_of_slack_is_free_and_scarce_slack_is_dear() -> None:
    stays, away = seen(2.0), seen(2.0)
    problem = CycleProblem(stays, away, 0.7, 0.1, slack=60.0, left=100.0, within=None)
    plenty = problem.solve()
    some, none = (problem._replace(slack=slack).solve() for slack in (20.0, 0.5))
    assert problem.is_free()
    assert not problem._replace(slack=20.0).is_free()
    assert plenty.price == 0.0
    assert 0 < some.price < none.price
    assert some.slack * 100 / some.hours <= 20.0


def test_slack_lasts_at_the_price_that_is_found() -> None:
    cycle = plan_cycle(seen(3.0), seen(1.0, 6.0), 0.7, 0.2, price=0.5)
    assert cycle.slack > 0
    assert cycle.gain < 0.7 * 3.0


hours = st.floats(0.01, 50)


@given(st.lists(hours, max_size=12), st.floats(0, 200))
def test_the_mean_of_the_rest_needs_no_copy(lengths: list[float], age: float) -> None:
    spells = SpellLengths()
    for length in lengths:
        spells = spells.with_one(length)
    assert spells.mean_beyond(age) == spells.beyond(age).mean


@given(st.lists(hours, max_size=6), st.lists(hours, max_size=6), st.floats(0, 90), st.floats(0, 30))
def test_slack_is_free_if_its_price_is_zero(
    with_spot: list[float], without: list[float], slack: float, age: float
) -> None:
    stays, away = SpellLengths(), SpellLengths()
    for length in with_spot:
        stays = stays.with_one(length)
    for length in without:
        away = away.with_one(length)
    problem = CycleProblem(stays, away, 0.7, 0.2, slack, left=100.0, within=away.beyond(age))
    assert problem.is_free() == (problem.solve().price == 0)


@given(
    st.lists(hours, max_size=12),
    st.floats(0, 60),
    st.floats(0, 60),
    st.floats(0, 9),
    st.floats(0.01, 0.99),
)
def test_the_thresholds_found_are_the_best_of_all(
    lengths: list[float], age: float, price: float, launch: float, saving: float
) -> None:
    spells = seen(*lengths, times=1)
    left = [(length - age, weight) for length, weight in spells._weighted if length > age]
    total = sum(weight for _, weight in left)
    rest = spells.beyond(age)
    waits, gains = [launch], [saving * rest.mean - launch]
    for threshold, _ in left:
        waited = sum(min(length, threshold) * weight for length, weight in left) / total
        longer = sum(weight for length, weight in left if length > threshold) / total
        waits.append(price * waited + launch * longer)
        gains.append(saving * (rest.mean - waited) - launch * longer)
    if left:
        assert plan_wait(rest, price, launch, 0.0).cost == pytest.approx(min(waits), abs=1e-6)
        assert plan_trust(rest, saving, launch)[1] == pytest.approx(max(0, *gains), abs=1e-6)


@given(st.floats(0, 100), st.floats(0, 100), st.floats(0, 5))
def test_a_guess_does_not_change_the_price_that_is_found(
    slack: float, before: float, rate: float
) -> None:
    def need(price: float) -> float:
        return 100 / (1 + rate * price)

    guess = find_price(need, before)
    assert find_price(need, slack, guess) == find_price(need, slack)


def test_a_guess_that_still_holds_saves_the_search() -> None:
    tried = []

    def need(price: float) -> float:
        tried.append(price)
        return 100 / (1 + price)

    guess = find_price(need, 20.0)
    tried.clear()
    assert find_price(need, 20.0, guess) == guess
    assert len(tried) == 3

"""Which running elastic jobs change their number of nodes."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cavvy.domain.values import replace
from cavvy.scheduler.elastic_sizes import (
    SCALING,
    ElasticRun,
    choose_donors,
    choose_growth,
    choose_moves,
    choose_returns,
    find_scaling,
    guess_rate,
)

HOUR = 3600.0
RUN = ElasticRun(
    id="a",
    project="p",
    place="x",
    sizes=(2, 4, 8),
    nodes=2,
    room=8,
    rates={2: 100.0},
    remaining=100 * HOUR,
    resize_s=40.0,
)


def test_between_measured_sizes_a_rate_follows_a_power_and_beyond_them_no_more_than_the_ideal() -> (
    None
):
    assert guess_rate({2: 100.0, 8: 400.0}, 4) == pytest.approx(200.0)
    assert guess_rate({2: 100.0, 4: 300.0}, 8) == pytest.approx(600.0), "at most in proportion"
    assert guess_rate({2: 100.0, 4: 90.0}, 8) == pytest.approx(90.0), "at least as fast"
    assert guess_rate({2: 100.0}, 4) == pytest.approx(100.0 * 2**SCALING)
    assert guess_rate({}, 1) == 1.0


def test_a_job_that_has_measured_one_size_is_expected_to_scale_as_others_have() -> None:
    assert find_scaling([{2: 100.0}, {}]) == SCALING
    assert find_scaling([{2: 100.0, 8: 400.0}, {2: 1.0}]) == pytest.approx(1.0)
    assert find_scaling([{2: 100.0, 8: 50.0}]) == 0.0
    assert replace(RUN, scaling=1.0).guess_rate(8) == pytest.approx(400.0)


def test_a_job_grows_into_free_nodes_if_that_pays() -> None:
    [step] = choose_growth([RUN])
    assert step.nodes == 8
    assert step.gain_s is not None
    faster = 4**SCALING
    assert step.gain_s == pytest.approx(HOUR - HOUR / faster - 40.0)
    short = replace(RUN, remaining=100 * 60.0)
    assert choose_growth([short]) == [], "the restart would cost more than it wins"
    assert choose_growth([replace(RUN, room=2)]) == []
    assert choose_growth([replace(RUN, rested=False)]) == []


def test_measured_sizes_decide_instead_of_the_first_guess() -> None:
    flat = replace(RUN, rates={2: 100.0, 4: 101.0, 8: 102.0})
    assert choose_growth([flat]) == []
    ideal = replace(RUN, rates={2: 100.0, 4: 200.0}, paid=True)
    assert [step.nodes for step in choose_growth([ideal])] == [8]


def test_the_jobs_of_a_place_share_what_is_free() -> None:
    other = replace(RUN, id="b", rates={2: 100.0, 4: 200.0, 8: 400.0})
    steps = {step.id: step.nodes for step in choose_growth([RUN, other])}
    grown = sum(steps.get(run.id, 2) - 2 for run in (RUN, other))
    assert grown <= 6
    assert steps["b"] == 8, "it makes more of the nodes"


def test_a_job_goes_back_to_a_smaller_size_on_which_it_was_faster() -> None:
    slower = replace(RUN, nodes=8, rates={2: 100.0, 8: 80.0})
    [step] = choose_returns([slower])
    assert step.nodes == 2
    assert choose_returns([replace(slower, rates={2: 100.0, 8: 99.0})]) == []
    assert choose_returns([replace(slower, remaining=800.0)]) == [], "it is nearly done"


def test_a_job_that_has_all_gives_some_to_one_that_makes_more_of_it() -> None:
    rates = {each: 100.0 * each**0.7 for each in (2, 4, 6, 8)}
    sizes = (2, 4, 6, 8)
    first = replace(RUN, sizes=sizes, nodes=8, room=8, rates=rates, remaining=1e6)
    second = replace(first, id="b", nodes=2, room=2)
    [step] = choose_moves([first, second])
    assert (step.id, step.nodes) in (("a", 4), ("a", 6)), "of ten nodes, each gets about a half"
    even = [replace(first, nodes=4, room=4), replace(second, nodes=4, room=4)]
    assert choose_moves(even) == [], "each change must pay"
    own = [replace(first, lends=0), replace(second, project="q")]
    assert choose_moves(own) == [], "it is within its quota"
    assert choose_moves([first, replace(second, rested=False)]) == []


def take(free: int, needed: int, runs: Mapping[str, int]) -> bool:
    return free + sum(runs.values()) >= needed


def test_as_few_nodes_as_suffice_are_given_and_only_what_is_lent() -> None:
    big, small = replace(RUN, nodes=8), replace(RUN, id="b", nodes=4)
    held = {"a": 8, "b": 4}

    def suffices(needed: int, sizes: Mapping[str, int]) -> bool:
        return take(0, needed, {key: held[key] - size for key, size in sizes.items()})

    steps = choose_donors("q", [big, small], lambda sizes: suffices(4, sizes))
    assert [(step.id, step.nodes) for step in steps] == [("a", 4)], "the one that has most gives"
    assert choose_donors("q", [big, small], lambda sizes: suffices(9, sizes)) == ()
    assert choose_donors("q", [big, small], lambda sizes: suffices(0, sizes)) == ()
    some = replace(big, lends=4)
    few = replace(small, lends=0)
    [step] = choose_donors("q", [some, few], lambda sizes: suffices(4, sizes))
    assert (step.id, step.nodes) == ("a", 4), "down to its quota"
    assert choose_donors("q", [some, few], lambda sizes: suffices(5, sizes)) == ()
    kept = replace(big, lends=0)
    assert choose_donors("q", [kept], lambda sizes: suffices(4, sizes)) == (), "its own quota"
    own = choose_donors("p", [kept], lambda sizes: suffices(4, sizes))
    assert [step.nodes for step in own] == [4], "jobs of one project give each other way"


def test_a_job_with_a_deadline_keeps_the_nodes_that_it_needs() -> None:
    rates = {2: 100.0, 4: 200.0, 8: 400.0}
    run = replace(RUN, nodes=8, rates=rates, remaining=200 * HOUR, time_left_s=HOUR + 60)
    assert run.least == 4
    assert replace(run, time_left_s=60.0).least == 2, "it is late in any case"


runs = st.builds(
    lambda sizes, at, room, rate, left, lends, rested, number: ElasticRun(
        id=f"j{number}",
        project="p",
        place="x",
        sizes=tuple(sorted(sizes)),
        nodes=sorted(sizes)[at % len(sizes)],
        room=sorted(sizes)[at % len(sizes)] + room,
        rates={} if rate is None else {sorted(sizes)[at % len(sizes)]: rate},
        remaining=left,
        resize_s=30.0,
        lends=lends,
        rested=rested,
    ),
    st.sets(st.integers(1, 64), min_size=1, max_size=6),
    st.integers(0, 5),
    st.integers(0, 40),
    st.none() | st.floats(0.01, 1e6),
    st.none() | st.floats(0, 1e9),
    st.none() | st.integers(0, 64),
    st.booleans(),
    st.integers(0, 10**6),
)


@given(st.lists(runs, max_size=5, unique_by=lambda run: run.id))
def test_growth_stays_within_ranges_and_what_is_free(given_runs: list[ElasticRun]) -> None:
    steps = {step.id: step for step in choose_growth(given_runs)}
    free = max((run.room - run.nodes for run in given_runs if run.rested), default=0)
    assert sum(steps[run.id].nodes - run.nodes for run in given_runs if run.id in steps) <= free
    for run in given_runs:
        if run.id in steps:
            assert run.rested
            assert steps[run.id].nodes in run.sizes
            assert run.nodes < steps[run.id].nodes <= run.room


@given(st.lists(runs, max_size=5, unique_by=lambda run: run.id))
def test_a_move_takes_only_what_is_lent_and_above_the_least(given_runs: list[ElasticRun]) -> None:
    by_id = {run.id: run for run in given_runs}
    for step in choose_moves(given_runs):
        run = by_id[step.id]
        assert run.rested
        assert run.least <= step.nodes < run.nodes
        assert step.nodes in run.sizes


@given(st.lists(runs, max_size=5, unique_by=lambda run: run.id), st.integers(0, 100))
def test_no_job_gives_more_than_it_must_or_less_than_it_may(
    given_runs: list[ElasticRun], needed: int
) -> None:
    by_id = {run.id: run for run in given_runs}

    def suffices(sizes: Mapping[str, int]) -> bool:
        return sum(by_id[key].nodes - size for key, size in sizes.items()) >= needed

    steps = {step.id: step.nodes for step in choose_donors("q", given_runs, suffices)}
    may = sum(run.nodes - run.find_floor("q") for run in given_runs)
    assert bool(steps) == (0 < needed <= may)
    for key, nodes in steps.items():
        run = by_id[key]
        assert run.lends is None or run.nodes - nodes <= run.lends
        assert run.least <= nodes < run.nodes
        larger = min(each for each in sorted({*run.sizes, run.nodes}) if each > nodes)
        assert not suffices({**steps, key: larger}), "it could have kept more"
    assert not steps or suffices(steps)

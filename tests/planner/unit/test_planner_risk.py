"""The checkpoint interval and the expected course of a disturbed run, against a simulation and
by their properties.
"""

import math
import random
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cavvy.domain.tasks import CheckpointPolicy
from cavvy.planner.risk import (
    CHECKPOINT_COST,
    HOPELESS,
    checkpoint_interval,
    chosen_interval,
    disturb,
)

HOUR = timedelta(hours=1)
SECOND = timedelta(seconds=1)


def test_the_interval_is_youngs_to_first_order() -> None:
    """sqrt(2 * 10 s * 100 h) = 2683 s; the higher terms change it by less than the cost itself."""
    found = checkpoint_interval(10 * SECOND, 100 * HOUR).total_seconds()
    assert found == pytest.approx(math.sqrt(2 * 10 * 360_000), abs=10)


def test_when_checkpoints_cost_more_than_failures_the_interval_is_the_mean_time_between_them() -> (
    None
):
    assert checkpoint_interval(3 * HOUR, HOUR) == HOUR


@pytest.mark.parametrize(("cost", "mtbf"), [(timedelta(0), HOUR), (HOUR, timedelta(0))])
def test_an_interval_without_cost_or_failures_is_refused(cost: timedelta, mtbf: timedelta) -> None:
    with pytest.raises(ValueError, match="above 0"):
        checkpoint_interval(cost, mtbf)


@pytest.mark.parametrize(("cost_s", "mtbf_h"), [(5, 2), (30, 5), (120, 5), (600, 24)])
def test_no_other_interval_is_notably_better(cost_s: int, mtbf_h: int) -> None:
    """Daly's estimate is within a thousandth of the best interval of his own model."""
    cost, mtbf = cost_s * SECOND, mtbf_h * HOUR

    def wall(every: timedelta) -> float:
        course = disturb(
            1000 * HOUR, start=timedelta(0), per_hour=1 / mtbf_h, every=every, write=cost
        )
        assert course is not None
        return course.wall_time.total_seconds()

    best = wall(checkpoint_interval(cost, mtbf))
    assert all(
        best <= 1.001 * wall(checkpoint_interval(cost, mtbf) * factor)
        for factor in (0.5, 0.8, 1.25, 2)
    )


def test_undisturbed_work_takes_its_time() -> None:
    course = disturb(HOUR, start=2 * SECOND, per_hour=0, every=None)
    assert course is not None
    assert (course.wall_time, course.preemptions) == (HOUR + 2 * SECOND, 0)


@pytest.mark.parametrize("every", [None, HOUR / 4])
def test_the_expectation_is_what_a_simulation_finds(every: timedelta | None) -> None:
    run, start, per_hour = 3 * HOUR, HOUR / 30, 0.4
    generator = random.Random(7)
    rate = per_hour / 3600
    walls, counts = [], []
    for _ in range(20_000):
        done, wall, count = 0.0, start.total_seconds(), 0
        segment = (every or run).total_seconds()
        while done < run.total_seconds() - 1e-6:
            until = generator.expovariate(rate)
            if until >= segment:
                done, wall = done + segment, wall + segment
            else:
                wall, count = wall + until + start.total_seconds(), count + 1
        walls.append(wall)
        counts.append(count)
    course = disturb(run, start=start, per_hour=per_hour, every=every)
    assert course is not None
    assert course.wall_time.total_seconds() == pytest.approx(sum(walls) / len(walls), rel=0.03)
    assert course.preemptions == pytest.approx(sum(counts) / len(counts), rel=0.04)


def test_long_work_without_checkpoints_is_hopeless() -> None:
    assert disturb(100 * HOUR, start=HOUR, per_hour=0.2, every=None) is None
    assert disturb(100 * HOUR, start=HOUR, per_hour=0.2, every=HOUR) is not None


lengths = st.integers(0, 10**6).map(lambda s: timedelta(seconds=s))


@given(
    lengths,
    lengths,
    st.floats(0, 10),
    st.none() | lengths,
    st.integers(0, 600).map(lambda s: timedelta(seconds=s)),
)
def test_disturbance_never_makes_work_shorter_and_never_endless(
    run: timedelta, start: timedelta, per_hour: float, every: timedelta | None, write: timedelta
) -> None:
    course = disturb(run, start=start, per_hour=per_hour, every=every, write=write)
    if course is not None:
        assert course.wall_time >= run + start - timedelta(milliseconds=1)
        assert course.preemptions >= 0
        assert course.wall_time <= start + HOPELESS * max(run, start) + SECOND


def test_the_interval_of_a_task() -> None:
    assert chosen_interval(None, 0.2) == (None, timedelta(0))
    assert chosen_interval(CheckpointPolicy(path="c", every=HOUR), 0.2) == (HOUR, timedelta(0))
    assert chosen_interval(CheckpointPolicy(path="c"), 0.2) == (
        checkpoint_interval(CHECKPOINT_COST, 5 * HOUR),
        CHECKPOINT_COST,
    )

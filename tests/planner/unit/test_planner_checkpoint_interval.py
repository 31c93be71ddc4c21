"""How often to save, from what was measured and seen; and whether a checkpoint fits into a
notice.
"""

from datetime import timedelta

import pytest

from cavvy.catalog.tables import SPOT_NOTICES
from cavvy.domain.tasks import CheckpointPolicy, TaskSpec
from cavvy.domain.values import replace
from cavvy.planner.rank import warn_of_notices
from cavvy.planner.risk import (
    CHECKPOINT_COST,
    FAILURES_PER_NODE_HOUR,
    SPOT_PREEMPTIONS_PER_HOUR,
    NodeLosses,
    checkpoint_interval,
    disturb,
    fit_notice,
    is_news,
    loss_rate,
    make_save_interval,
    say_fit,
)

SECOND = timedelta(seconds=1)


def test_nothing_seen_is_the_prior_and_much_seen_is_what_was_seen() -> None:
    assert loss_rate(NodeLosses(), spot=True) == pytest.approx(SPOT_PREEMPTIONS_PER_HOUR)
    assert loss_rate(NodeLosses(), spot=False) == pytest.approx(FAILURES_PER_NODE_HOUR)
    assert loss_rate(NodeLosses(lost=2000, node_hours=1000), spot=True) == pytest.approx(
        2, rel=0.03
    )
    assert 0 < loss_rate(NodeLosses(node_hours=1e6), spot=True) < 1e-5
    assert (
        loss_rate(NodeLosses(lost=1, node_hours=1), spot=True) < 0.3
    )  # one loss is no rate of one an hour


def test_it_is_dalys_interval_of_the_measured_cost_and_the_whole_gangs_losses() -> None:
    save_interval = make_save_interval(20 * SECOND, NodeLosses(), spot=True, nodes=4)
    assert save_interval.per_hour == pytest.approx(0.8)
    assert save_interval.every == checkpoint_interval(20 * SECOND, timedelta(hours=1 / 0.8))
    assert save_interval.measured
    assumed = make_save_interval(None, NodeLosses(), spot=True, nodes=4)
    assert (assumed.cost, assumed.measured) == (CHECKPOINT_COST, False)
    assert make_save_interval(timedelta(0), NodeLosses(), spot=True, nodes=1).every >= SECOND


@pytest.mark.parametrize("cost_s", [0.5, 5, 60, 300])
@pytest.mark.parametrize("per_hour", [0.05, 0.2, 2])
def test_no_other_interval_loses_noticeably_less(cost_s: float, per_hour: float) -> None:
    hours = 1e6  # so much seen that the prior does not count
    cost, losses = (
        timedelta(seconds=cost_s),
        NodeLosses(lost=int(per_hour * hours), node_hours=hours),
    )
    every = make_save_interval(cost, losses, spot=True, nodes=1).every

    def wall(length: timedelta) -> timedelta:
        course = disturb(
            timedelta(hours=48), start=60 * SECOND, per_hour=per_hour, every=length, write=cost
        )
        assert course is not None
        return course.wall_time

    best = wall(every)
    assert all(best <= wall(every * factor) * 1.001 for factor in (0.25, 0.5, 0.8, 1.25, 2, 4))


def test_small_changes_are_no_news() -> None:
    assert is_news(None, 600 * SECOND)
    assert not is_news(600 * SECOND, 650 * SECOND)
    assert is_news(600 * SECOND, 700 * SECOND)
    assert is_news(600 * SECOND, 500 * SECOND)


def test_a_checkpoint_fits_if_step_and_bytes_do() -> None:
    assert fit_notice(3 * 10**9, 1e8, 30 * SECOND).fits
    assert not fit_notice(3 * 10**9, 1e8, 30 * SECOND, step=SECOND).fits
    assert fit_notice(3 * 10**9, 1e8, 30 * SECOND, step=SECOND).needed == 31 * SECOND
    with pytest.raises(ValueError, match="bandwidth"):
        fit_notice(1, 0, SECOND)


def test_a_plan_says_whether_a_checkpoint_fits_into_the_notice() -> None:
    def say(size_mib: int | None, notice: timedelta) -> str:
        task = TaskSpec(name="x", run="x", checkpoint=CheckpointPolicy(path="c", size_mib=size_mib))
        return " ".join(say_fit(task, notice))

    assert say(None, 30 * SECOND) == ""
    assert "less than the preemption notice of 2m00s" in say(12 * 1024, 120 * SECOND)
    assert "longer than the preemption notice of 30s" in say(12 * 1024, 30 * SECOND)


def test_the_step_in_hand_decides_whether_a_checkpoint_fits() -> None:
    def say(step: timedelta | None, notice: timedelta | None) -> str:
        task = TaskSpec(
            name="x", run="x", checkpoint=CheckpointPolicy(path="c", size_mib=12 * 1024, step=step)
        )
        return " ".join(say_fit(task, notice))

    short, long = say(10 * SECOND, 120 * SECOND), say(30 * SECOND, 120 * SECOND)
    assert "a step of 10s takes 1m53s, which is less than the preemption notice of 2m00s" in short
    assert "a step of 30s takes 2m13s; this is longer than the preemption notice of 2m00s" in long
    assert "length is unknown (set `checkpoint.step`)" in say(None, 120 * SECOND)
    assert "this market gives no preemption notice" in say(None, None)


def test_spot_whose_notice_is_too_short_is_warned_of_wherever_it_ranks() -> None:
    spots = ["aws", "gcp", "azure", "x"]
    task = TaskSpec(name="x", run="x", checkpoint=CheckpointPolicy(path="c", size_mib=12 * 1024))
    short, unknown = warn_of_notices(task, spots, SPOT_NOTICES)
    assert short.startswith("spot at azure, gcp: ")
    assert "a checkpoint of 12" in short
    assert "notice of 30s" in short
    assert unknown.startswith("spot at x: ")
    assert warn_of_notices(task, [], SPOT_NOTICES) == ()
    assert (
        warn_of_notices(replace(task, checkpoint=CheckpointPolicy(path="c")), spots, SPOT_NOTICES)
        == ()
    )

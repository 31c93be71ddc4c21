"""What a broker counts of its calls, and what it tells of them."""

from datetime import UTC, datetime
from typing import Any

import pytest

from cavvy.capabilities.functions.counts.routes import TimeGrid, find_times
from cavvy.capabilities.functions.on_node.counts import CallCounts, bucket_of, time_of

DONE: dict[str, Any] = {"op": "done"}
NOW = 1_800_000_010.0


def take(counts: CallCounts, now: float = NOW, running: int = 0, kept: int = 0) -> Any:
    return counts.take(1, {"f": running} if running else {}, {"f": kept} if kept else {}, now)


@pytest.mark.parametrize("seconds", [0.0, 1e-5, 1e-3, 0.05, 1.0, 90.0, 86400.0])
def test_a_time_is_known_to_eight_percent(seconds: float) -> None:
    assert time_of(bucket_of(seconds)) == pytest.approx(seconds, rel=0.08, abs=1.1e-4)


def test_times_are_of_the_calls_that_they_count() -> None:
    buckets = {bucket_of(0.01): 98, bucket_of(1.0): 1, bucket_of(5.0): 1}
    half, most, all_of_them = find_times(buckets, (0.5, 0.99, 1.0))
    assert half == pytest.approx(0.01, rel=0.08)
    assert most == pytest.approx(1.0, rel=0.08)
    assert all_of_them == pytest.approx(5.0, rel=0.08)
    assert find_times({bucket_of(0.01): 1}, (0.5, 0.99)) == [time_of(bucket_of(0.01))] * 2
    assert find_times({}, (0.5,)) == [None]


def test_a_minute_is_told_whole_and_only_after_a_change() -> None:
    counts = CallCounts()
    counts.begin("f")
    counts.begin("f")
    assert take(counts, running=1)["gauges"] == {"f": [1, 1, 0]}
    assert take(counts, running=1) is None
    counts.end("f", DONE, 0.1, 0.2, NOW)
    failed = {"op": "failed", "type": "ValueError", "text": "no\nway", "trace": "at line 1"}
    counts.end("f", failed, 0.1, 0.2, NOW)
    (minute,) = take(counts)["minutes"]
    assert (minute["function"], minute["minute"]) == ("f", NOW // 60 * 60)
    assert (minute["done"], minute["failed"]) == (1, 1)
    assert minute["ran"] == {str(bucket_of(0.1)): 2}
    assert [each["state"] for each in minute["recent"]] == ["failed", "done"]
    counts.begin("f")
    counts.end("f", DONE, 0.1, 0.2, NOW + 1)
    (again,) = take(counts, NOW + 2)["minutes"]
    assert (again["minute"], again["done"]) == (minute["minute"], 2), "it replaces the first"
    assert take(counts, NOW + 3) is None
    assert take(counts, NOW + 65)["minutes"] == [], "that it still runs"


def test_calls_that_the_control_plane_keeps_are_counted_there() -> None:
    counts = CallCounts()
    assert take(counts, running=2, kept=2)["gauges"] == {"f": [0, 2, 2]}
    counts.end("f", {**DONE, "key": "c1"}, 0.1, 0.2, NOW)
    (minute,) = take(counts)["minutes"]
    assert (minute["done"], minute["recent"]) == (0, [])
    assert sum(minute["ran"].values()) == 1, "its time counts"


def test_a_call_that_was_dropped_waits_no_more() -> None:
    counts = CallCounts()
    counts.begin("f")
    counts.drop("f")
    assert take(counts)["gauges"] == {"f": [0, 0, 0]}


def test_of_many_calls_only_some_are_told_one_by_one() -> None:
    counts = CallCounts()
    for number in range(1000):
        counts.begin("f")
        counts.end("f", {"op": "failed", "trace": "x" * 10_000}, 0.1, 0.2, NOW + number / 1000)
    (minute,) = take(counts)["minutes"]
    assert minute["failed"] == 1000
    assert len(minute["recent"]) == 10
    assert all(len(each["trace"]) == 4000 for each in minute["recent"])


def test_steps_begin_with_the_first_call() -> None:
    now = datetime.fromtimestamp(6000, UTC)
    assert TimeGrid.make([], 60, now)[1:] == (60.0, 10)
    grid = TimeGrid.make([0, 5940], 60, now)
    assert grid.find(10**9) == grid.steps - 1, "a node's clock is ahead"
    assert grid.step_s == 120.0
    assert (grid.find(0), grid.find(5940), grid.steps) == (0, 49, 50)
    assert TimeGrid.make([0], 600, now)[1:] == (600.0, 10)

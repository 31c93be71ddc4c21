"""Figures of ranks over time: collected by the agent, packed into days, summarized for charts."""

import random
from datetime import datetime, timedelta
from math import isnan, nan
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.control.unit.test_control_reports import NODE, NOW, applied, message

from cavvy.agent.outbox import time_text
from cavvy.agent.work import meters
from cavvy.agent.work.meters import RateMeter, read_network
from cavvy.agent.work.monitor import MOST_REPORTED, MinuteFigures
from cavvy.domain.figures import (
    MOST_NAMES,
    FigureBlock,
    FigureColumns,
    choose_step,
    join_blocks,
    summarize_blocks,
)
from cavvy.domain.jobs import NodePhase
from cavvy.domain.messages import MessageKind
from cavvy.domain.values import replace
from cavvy.store.figures import MERGED, MOST_BYTES, pack, unpack

DAY = 24 * 60


def block(minutes: list[int], **means: list[float]) -> FigureBlock:
    columns = {
        name: FigureColumns(low=values, mean=values, high=values) for name, values in means.items()
    }
    return FigureBlock(attempt_id="j-1", rank=3, minutes=minutes, columns=columns)


_values = st.floats(min_value=-1e30, max_value=1e30) | st.just(nan)


@given(
    gaps=st.lists(st.integers(1, 40), min_size=1, max_size=30),
    rows=st.lists(st.tuples(_values, st.floats(0, 10), st.floats(0, 10)), min_size=30, max_size=30),
)
def test_packed_figures_keep_their_precision(
    gaps: list[int], rows: list[tuple[float, float, float]]
) -> None:
    minutes = [sum(gaps[: n + 1]) + 29_000_000 for n in range(len(gaps))]
    mean = [row[0] for row in rows[: len(gaps)]]
    low = [row[0] - abs(row[0]) * row[1] for row in rows[: len(gaps)]]
    high = [row[0] + abs(row[0]) * row[2] for row in rows[: len(gaps)]]
    first = FigureBlock(
        attempt_id="j-1",
        rank=3,
        minutes=minutes,
        columns={"loss": FigureColumns(low=low, mean=mean, high=high)},
    )
    found = unpack("j-1", 3, pack(first))
    assert list(found.minutes) == minutes
    columns = found.columns["loss"]
    for n in range(len(gaps)):
        if isnan(mean[n]):
            assert isnan(columns.mean[n])
            continue
        assert columns.mean[n] == pytest.approx(mean[n], rel=5e-4, abs=1e-37)
        assert columns.low[n] <= columns.mean[n] <= columns.high[n]
        assert columns.low[n] == pytest.approx(low[n], rel=0.034, abs=1e-37)
        assert columns.high[n] == pytest.approx(high[n], rel=0.034, abs=1e-37)


def test_counters_keep_the_differences_that_tell_the_speed() -> None:
    steps = [1_000_000.0 + 7 * n for n in range(60)]
    found = unpack("j-1", 3, pack(block([*range(60)], step=steps))).columns["step"]
    assert list(found.mean) == pytest.approx(steps, abs=1)
    one = unpack("j-1", 3, pack(block([7], step=steps[:1]))).columns["step"]
    assert one.mean[0] == pytest.approx(steps[0], abs=1)


def test_values_beyond_the_floats_are_kept_as_the_largest() -> None:
    found = unpack("j-1", 3, pack(block([7], loss=[1e300]))).columns["loss"]
    assert found.mean[0] == pytest.approx(3e38, rel=0.01)


def test_only_the_asked_names_are_unpacked() -> None:
    packed = pack(block([7, 8], loss=[1, 2], step=[3, 4]))
    assert [*unpack("j-1", 3, packed, ["step", "other"]).columns] == ["step"]


def make_busy_day(day: int, names: int, noise: float, spread: float = 0.2) -> FigureBlock:
    """A day whose figures are noisy in each minute."""
    dice = random.Random(day)
    columns = {}
    for n in range(names):
        mean = [100 * dice.gauss(1, noise) for _ in range(DAY)]
        columns[f"figure{n}"] = FigureColumns(
            low=[each * dice.uniform(1 - spread, 1) for each in mean],
            mean=mean,
            high=[each * dice.uniform(1, 1 + spread) for each in mean],
        )
    minutes = [day * DAY + n for n in range(DAY)]
    return FigureBlock(attempt_id="j-1", rank=0, minutes=minutes, columns=columns)


def test_a_day_of_many_noisy_figures_takes_no_more_than_its_share() -> None:
    packed = pack(make_busy_day(1, MOST_NAMES, 0.5))
    assert len(packed) <= MOST_BYTES
    found = unpack("j-1", 0, packed)
    assert len(found.columns) > MOST_NAMES / 4
    assert 31 * MOST_BYTES <= 1_000_000


def test_thirty_days_of_a_busy_rank_take_less_than_a_megabyte() -> None:
    day = make_busy_day(1, 16, 0.02, 0.05)
    packed = pack(day)
    columns = {
        name: FigureColumns(low=each.low[:1], mean=each.mean[:1], high=each.high[:1])
        for name, each in day.columns.items()
    }
    minute = len(pack(replace(day, minutes=day.minutes[:1], columns=columns)))
    assert 31 * len(packed) + MERGED * minute < 1_000_000
    found, stated = unpack("j-1", 0, packed).columns["figure3"], day.columns["figure3"]
    assert list(found.mean) == pytest.approx(list(stated.mean), rel=0.002)
    assert list(found.high) == pytest.approx(list(stated.high), rel=0.13)
    assert any(high > mean for high, mean in zip(found.high, found.mean, strict=True))


def test_blocks_are_joined_by_minute_and_unknown_values_stay_unknown() -> None:
    joined = join_blocks([block([5, 6], a=[1, 2]), block([7], b=[3]), block([6], a=[4])])
    assert joined.minutes == [5, 6, 7]
    assert joined.columns["a"].mean[:2] == [1, 4]
    assert isnan(joined.columns["a"].mean[2])
    assert joined.columns["b"].high[2] == 3


def test_figures_are_summarized_in_equal_steps() -> None:
    found = summarize_blocks(
        [block([10, 11, 14], a=[1, 3, nan]), block([16, 99], a=[8, 9])], start=10, step=2, count=4
    )
    assert found["a"].low[0] == 1
    assert found["a"].mean[0] == 2
    assert found["a"].high[0] == 3
    assert isnan(found["a"].mean[1])
    assert isnan(found["a"].low[2])
    assert found["a"].mean[3] == 8


@pytest.mark.parametrize(
    ("minutes", "points", "step"),
    [(1, 300, 1), (299, 300, 1), (300, 300, 2), (DAY, 300, 5), (31 * DAY, 2, DAY)],
)
def test_the_step_is_the_shortest_that_fits(minutes: int, points: int, step: int) -> None:
    assert choose_step(minutes, points) == step


class Minutes:
    """The agent's figures on a clock that the test moves."""

    def __init__(self) -> None:
        self.now = 6000.0
        self.said: list[tuple[str, dict[str, Any]]] = []
        self.figures = MinuteFigures(
            lambda kind, **fields: self.said.append((kind, fields)), lambda: self.now
        )


def test_the_agent_sends_each_minute_once_with_its_spread() -> None:
    node = Minutes()
    for value in (10, 40):
        node.figures.measure({"gpu_percent": value})
        node.figures.tick()
    node.figures.report({"loss": 0.5, "unit": "samples", "total": 9, "gpu_percent": 1})
    node.now += 60.5
    node.figures.tick()
    node.figures.tick()
    assert node.said == [
        ("minute", {"seconds": 60.5, "figures": {"gpu_percent": [10, 25, 40], "loss": [0.5] * 3}})
    ]
    node.now += 60
    node.figures.tick()
    assert len(node.said) == 1, "a minute without figures is not sent"
    node.figures.measure({"gpu_percent": 1})
    node.now -= 300  # the clock is set back
    node.figures.send()
    assert node.said[1][1]["seconds"] == 0


def test_a_task_that_reports_many_names_fills_no_more_than_its_share() -> None:
    node = Minutes()
    for n in range(500):
        node.figures.report({f"name{n}": n, "x" * 65: 1})
    node.figures.send()
    assert len(node.said[0][1]["figures"]) == MOST_REPORTED


def test_a_minute_becomes_a_block_at_the_time_when_it_began() -> None:
    at = NOW + timedelta(seconds=-2)
    spread = (1.0, 2.0, 3.0)
    said = message(MessageKind.MINUTE, at=at, seconds=61.0, figures={"loss": spread})
    [found] = applied(said).figures
    assert found.minutes == [int((at - timedelta(seconds=60.5)).timestamp()) // 60]
    assert (found.attempt_id, found.rank) == (NODE.attempt_id, NODE.rank)
    assert found.columns["loss"] == FigureColumns(low=[1.0], mean=[2.0], high=[3.0])


def test_no_minute_is_stored_as_the_one_before_it() -> None:
    """The agent cuts the time of a message to milliseconds, and rounds the length of a minute."""
    node, stored = Minutes(), list[int]()
    claimed = NOW - timedelta(hours=4)
    node.now = claimed.timestamp() // 60 * 60 + 60
    for n in range(200):
        node.figures.measure({"gpu_percent": n})
        node.now += 60 + n % 7 / 10_000
        node.figures.send()
        fields = node.said[-1][1]
        at = datetime.fromisoformat(time_text(node.now))
        said = message(
            MessageKind.MINUTE, at=at, seconds=fields["seconds"], figures=fields["figures"]
        )
        [found] = applied(said, node=replace(NODE, claimed_at=claimed)).figures
        stored += found.minutes
    assert len(set(stored)) == 200


def test_a_minute_before_the_claim_counts_for_the_first_of_the_node() -> None:
    spread = {"loss": (1.0, 1.0, 1.0)}
    [found] = applied(message(MessageKind.MINUTE, seconds=86_400.0, figures=spread)).figures
    assert found.minutes == [int(NODE.claimed_at.timestamp()) // 60]  # type: ignore[union-attr]  # it is claimed


def test_late_and_endless_figures_of_an_agent_are_dropped() -> None:
    many = {f"name{n:03}": (1.0, 1.0, 1.0) for n in range(200)}
    [found] = applied(message(MessageKind.MINUTE, figures=many)).figures
    assert len(found.columns) == MOST_NAMES
    ended = replace(NODE, phase=NodePhase.EXITED)
    assert applied(message(MessageKind.MINUTE, figures=many), node=ended).figures == []
    assert applied(message(MessageKind.MINUTE)).figures == []


def test_rates_are_differences_of_counters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, read, received = [100.0], [5 << 20], [1 << 30]
    monkeypatch.setattr(meters.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(
        meters, "read_io", lambda pid: {"disk_read_mib_s": read[0], "disk_write_mib_s": 0}
    )
    monkeypatch.setattr(meters, "read_network", lambda pid: (received[0], 0))
    meter = RateMeter()
    meter.look([7])
    now[0], read[0], received[0] = 110.0, 25 << 20, received[0] + (50 << 20)
    meter.look([7])
    assert meter.rates == {
        "disk_read_mib_s": 2.0,
        "disk_write_mib_s": 0.0,
        "net_in_mib_s": 5.0,
        "net_out_mib_s": 0.0,
    }
    received[0] = 0  # as after the interface was replaced
    now[0] = 120.0
    meter.look([7])
    assert meter.rates["net_in_mib_s"] == 0
    meter.look([])
    assert "net_in_mib_s" not in meter.rates


def test_the_counters_of_this_machine_can_be_read() -> None:
    import os

    found = read_network(os.getpid())
    assert found is not None
    assert min(found) >= 0
    assert set(meters.read_io(os.getpid())) == {"disk_read_mib_s", "disk_write_mib_s"}
    assert meters.read_io(1 << 30) == {}

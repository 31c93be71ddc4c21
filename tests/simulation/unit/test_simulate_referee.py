"""From the JSON of `cavvy simulate spot --segments` and the trace file alone, a referee outside the
product works out cost, deadline and optimum again.
"""

import json
import random
from math import inf
from pathlib import Path

import pytest
from click.testing import CliRunner

from cavvy.cli.main import cli

TICK_S, WORK, OVERHEAD, SPOT = 600, 36, 3, 0.4  # lengths in ticks, spot over on-demand


def test_cost_deadline_and_optimum_come_out_again(tmp_path: Path) -> None:
    pytest.importorskip("numpy")
    counts = draw_counts()
    (tmp_path / "z-1a_gpu_1.json").write_text(
        json.dumps({"metadata": {"gap_seconds": TICK_S}, "data": counts})
    )
    job = ("--work", "6h", "--deadline", "7h,10h", "--overhead", "0.5h", "--spot-ratio", str(SPOT))
    how = ("--windows", "4", "--processes", "1", "--segments", "-o", "json")
    answer = CliRunner().invoke(
        cli, ["simulate", "spot", "--trace", str(tmp_path), *job, *how], catch_exceptions=False
    )
    document = json.loads(answer.stdout)
    spent: dict[str, list[tuple[float, float]]] = {}
    for run in document["runs"]:
        check_segments(run, counts)
        first = round(run["start_s"] / TICK_S)
        deadline = round(run["deadline_s"] / TICK_S)
        optimum = least_cost([count > 0 for count in counts[first : first + deadline]])
        assert run["optimum_usd"] == pytest.approx(optimum)
        spent.setdefault(run["policy"], []).append((run["usd"], optimum))
    assert set(spent) == {"auto", "uniform-progress", "greedy"}
    for policy, pairs in spent.items():
        score = document["policies"][policy]
        assert score["runs"] == len(pairs) == 8
        assert score["missed_deadlines"] == 0
        assert score["mean_usd"] == pytest.approx(sum(usd for usd, _ in pairs) / len(pairs))
        ratio = sum(usd for usd, _ in pairs) / sum(optimum for _, optimum in pairs)
        assert score["cost_over_optimum"]["mean"] == pytest.approx(ratio)
        assert score["cost_over_optimum"]["worst"] == pytest.approx(
            max(usd / optimum for usd, optimum in pairs)
        )


def draw_counts() -> list[int]:
    source = random.Random(11)
    counts: list[int] = []
    up = 0
    while len(counts) < 400:
        counts += [up] * source.choice([1, 2, 3, 8, 20])
        up = 1 - up
    return counts


def check_segments(run: dict, counts: list[int]) -> None:  # type: ignore[type-arg]  # a JSON object
    """Stays follow each other without a gap, spot is there while it is used, and money and work
    are those of stays.
    """
    now = usd = work = 0.0
    for one in run["segments"]:
        assert one["start_s"] == pytest.approx(now)
        now = one["end_s"]
        length = one["end_s"] - one["start_s"]
        if one["mode"] == "idle":
            continue
        if one["mode"] == "spot":
            first = (run["start_s"] + one["start_s"]) / TICK_S
            last = (run["start_s"] + one["end_s"]) / TICK_S
            assert all(counts[int(first + 1e-6) : int(last - 1e-6) + 1])
        usd += length / 3600 * (SPOT if one["mode"] == "spot" else 1.0)
        work += max(0.0, length - OVERHEAD * TICK_S)
    assert usd == pytest.approx(run["usd"])
    assert work == pytest.approx(WORK * TICK_S) == pytest.approx(run["work_s"])
    assert now == pytest.approx(run["end_s"])
    assert run["end_s"] <= run["deadline_s"] + 0.01
    assert run["missed"] is False


def least_cost(up: list[bool]) -> float:
    """Tick by tick from the deadline backwards: the least cost of so much work from each state."""
    hours = TICK_S / 3600
    rates = {"spot": SPOT * hours, "on-demand": hours}
    states = [("idle", 0), *[(mode, loading) for mode in rates for loading in range(OVERHEAD + 1)]]
    after = {
        (state, left): 0.0 if left == 0 else inf for state in states for left in range(WORK + 1)
    }
    for there in reversed(up):
        before = {}
        for (mode, loading), left in after:
            least = 0.0 if left == 0 else after[("idle", 0), left]
            for other, rate in rates.items():
                if left == 0 or (other == "spot" and not there):
                    continue
                ahead = loading if other == mode else OVERHEAD
                then = ((other, ahead - 1), left) if ahead else ((other, 0), left - 1)
                least = min(least, rate + after[then])
            before[(mode, loading), left] = least
        after = before
    return after[("idle", 0), WORK]

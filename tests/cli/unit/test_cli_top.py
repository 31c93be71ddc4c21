"""`cavvy nodes top`, and what `cavvy status` says about the progress of a job."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from tests.cli.unit.test_cli_jobs import run
from tests.unit.cli_client import FakeClient, at, client, make_attempt, make_job, make_node

from cavvy.client import wire
from cavvy.client.metrics import estimate_left_s, find_share, find_use
from cavvy.domain.figures import describe_stragglers, find_stragglers

__all__ = ["client"]


def make_row(**changes: Any) -> wire.NodeListing:
    facts: dict[str, Any] = {
        "project": "default",
        "job": "train",
        "job_id": "j1",
        "attempt": 1,
        "rank": 0,
        "gang": "rm-j1-1",
        "placement": "aws/us-east-1/p5/spot",
        "phase": "running",
        "rank_phase": "running",
        "rate_micros_per_hour": 1,
        "since": at(1),
        "heard_at": datetime.now(UTC),
        "devices": [],
        "accelerator": "H100",
        "accelerator_count": 8,
        "telemetry": {"gpu_percent": 97.4, "gpu_memory_mib": 71680.0, "cpu_percent": 412.0},
        "progress": {"done": 3, "total": 4, "unit": "steps"},
    }
    return wire.NodeListing(**{**facts, **changes})


def test_top_shows_the_use_of_all_nodes(client: FakeClient) -> None:
    other = {"gpu_percent": 99.0, "net_in_mib_s": 12.34}
    client.rows = [make_row(rank=1), make_row(), make_row(job="a", telemetry=other, progress={})]
    shown = [line.split() for line in run("top", "--once").stdout.splitlines()]
    assert [row[1] for row in shown[1:]] == ["a", "train", "train"]
    assert shown[2][6:9] == ["97%", "70", "GiB"] or "97%" in shown[2]
    assert "12.3" in shown[1]
    assert "3/4" in shown[2]
    hottest = run("top", "--once", "--sort", "gpu", "-o", "json").stdout
    rows = json.loads(hottest)
    assert (rows[0]["job"], rows[0]["gpu_percent"]) == ("a", 99.0)
    assert rows[1]["accelerator_count"] == 8
    assert rows[1]["progress"]["done"] == 3
    assert rows[0]["gpu_memory_mib"] is None


def test_top_shows_each_gpu_and_status_only_the_whole(client: FakeClient) -> None:
    each = {"gpu_percent.0": 96.0, "gpu_percent.1": 4.0, "gpu_memory_mib.1": 9.0}
    odd = {"gpu_percent.": 1.0, "gpu_percent.x": 1.0, "gpu_percent.99999": 1.0, "note.0": 1.0}
    telemetry = {"gpu_percent": 50.0, "cpu_percent": 7.0, **each, **odd}
    client.rows = [make_row(telemetry=telemetry), make_row(job="z", telemetry={"gpu_percent": 9.0})]
    rows = json.loads(run("top", "--gpus", "-o", "json").stdout)
    seen = [(row["gpu"], row["gpu_percent"], row["cpu_percent"]) for row in rows]
    assert seen == [(0, 96.0, 7.0), (1, 4.0, None), (None, 9.0, None)]
    assert [row["gpu_percent"] for row in json.loads(run("top", "-o", "json").stdout)] == [50, 9]
    assert "GPU NO" in run("top", "--gpus").stdout
    assert find_use({**each, "gpu_percent": 50.0}) == {"gpu_percent": 50.0}


def test_top_without_nodes_says_so(client: FakeClient) -> None:
    assert "nothing is running" in run("top").stdout


def test_status_shows_a_bar_and_the_time_left(client: FakeClient) -> None:
    told = run("status", "now").stdout
    assert "[=====---------------] 25%  3/12 epochs" in told
    assert "about" not in told, "the program has said it"
    node = make_node(progress={"done": 30, "total": 90})
    client.all_jobs["now"] = make_job("now", "running", attempts=[make_attempt(1, nodes=[node])])
    means = [None, 10.0, None, 30.0]
    client.series = [
        wire.SeriesView(attempt=1, rank=0, name="done", low=means, mean=means, high=means)
    ]
    assert "33%  30/90  about 6m00s left" in run("status", "now").stdout
    client.series = []
    assert "left" not in run("status", "now").stdout


def test_status_names_stragglers_and_silence(client: FakeClient) -> None:
    nodes = [
        make_node(rank=rank, progress={"step_ms": ms}, telemetry={"still_s": still})
        for rank, (ms, still) in enumerate([(100, 700), (104, 650), (180, 640), (98, 900)])
    ]
    client.all_jobs["now"] = make_job("now", "running", attempts=[make_attempt(1, nodes=nodes)])
    told = " ".join(run("status", "now").stdout.split())
    assert "stragglers steps take longer than the median: rank 2 (1.8 times)" in told
    assert "no progress for 10m40s, since " in told
    assert " UTC, on any rank" in told


@pytest.mark.parametrize(
    ("progress", "share"),
    [
        ({"done": 1, "total": 4}, 0.25),
        ({"done": 9, "total": 4}, 1.0),
        ({"done": -9, "total": 4}, 0.0),
        ({"fraction": 0.5}, 0.5),
        ({"done": 1, "total": 0}, None),
        ({"done": "1", "total": 4}, None),
        ({"loss": 1}, None),
    ],
)
def test_the_share_of_odd_progress(progress: dict[str, Any], share: float | None) -> None:
    assert find_share(progress) == share


def test_the_time_left_of_odd_progress_is_unknown() -> None:
    def series(*mean: float | None) -> wire.SeriesView:
        values = [*mean]
        return wire.SeriesView(attempt=1, rank=0, name="done", low=values, mean=values, high=values)

    whole = {"done": 5, "total": 10}
    assert estimate_left_s(whole, series(1, 2, 3), 60) == 300
    assert estimate_left_s({"left_s": -4}, None, 60) == 0
    # Work of 10 in a minute, which began 20 seconds before the end of the first one.
    begun = wire.SeriesView(
        attempt=1, rank=0, name="done", low=[0.0, 4.0], mean=[2.0, 9.0], high=[4.0, 14.0]
    )
    assert estimate_left_s({"done": 14, "total": 100}, begun, 60) == pytest.approx(516)
    for absurd in ({"left_s": 1e15}, {"left_s": float("nan")}, {"done": 3, "total": 10**18}):
        assert estimate_left_s(absurd, series(1, 2, 3), 60) is None
    for found in (None, series(), series(None), series(3), series(3, 3), series(3, 1)):
        assert estimate_left_s(whole, found, 60) is None
    assert estimate_left_s({"done": 11, "total": 10}, series(1, 2), 60) is None
    assert estimate_left_s({"done": "x", "total": 10}, series(1, 2), 60) is None


def test_few_ranks_and_usual_differences_are_no_stragglers() -> None:
    def progress(*step_ms: object) -> dict[int, dict[str, Any]]:
        return {rank: {"step_ms": ms} for rank, ms in enumerate(step_ms)}

    assert find_stragglers(progress(100, 900)) == []
    assert find_stragglers(progress(100, 110, 120, "x", 0, -5)) == []
    assert find_stragglers(progress(100, 100, 100, 200)) == [(3, 2.0)]
    assert find_stragglers(progress(100, 100, 100, float("inf"), float("nan"))) == []
    many = [(rank, 2.0) for rank in range(100)]
    assert describe_stragglers(many).endswith("rank 7 (2.0 times) and 92 more")

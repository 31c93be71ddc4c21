"""`cavvy batch` shows the rows, the cost and the forecast of a batch."""

import json
from collections.abc import Sequence
from pathlib import Path

from tests.scheduler.unit.test_cli_arrays import arrays, client, make_array, run

from cavvy.client.array_wire import ArrayDetail
from cavvy.domain.values import replace

__all__ = ("arrays", "client")  # fixtures


def make_batch(phases: Sequence[str], told: Sequence[dict[str, float | str]]) -> ArrayDetail:
    found = make_array(phases)
    jobs = [replace(job, progress=each) for job, each in zip(found.jobs, told, strict=True)]
    return replace(found, array=replace(found.array, spent_micros=2_000_000), jobs=jobs)


def test_a_batch_shows_its_rows_cost_and_forecast(arrays: list[ArrayDetail]) -> None:
    about = {"total": 1000, "batch_rows": 1000, "before_rows": 100}
    told: list[dict[str, float | str]] = [
        {**about, "done": 300, "rows_per_s": 10},
        {**about, "done": 280, "rows_per_s": 4},
        {},
    ]
    arrays.append(make_batch(["running", "done", "queued"], told))
    shown = run("batch", "many").stdout
    assert "30% 300 of 1,000 rows, 100 of them by an earlier batch" in shown
    assert "$2.00 so far, $10,000.00 per million rows" in shown
    assert "1m10s left at 10 rows/s, about $9.00 in total" in shown
    found = json.loads(run("batch", "many", "-o", "json").stdout)
    assert (found["rows_done"], found["left_s"], found["total_micros"]) == (300, 70.0, 9_000_000)


def test_jobs_that_cannot_see_each_other_report_their_parts(arrays: list[ArrayDetail]) -> None:
    parts: list[dict[str, float | str]] = [
        {"done": 20, "total": 40, "batch_rows": 100, "rows_per_s": 0},
        {"done": 30, "total": 60, "batch_rows": 100, "rows_per_s": "fast"},
    ]
    arrays.append(make_batch(["running", "running"], parts))
    shown = run("batch", "many").stdout
    assert "50% 50 of 100 rows" in shown
    assert "left" not in shown


def test_odd_figures_of_jobs_are_no_rows(arrays: list[ArrayDetail]) -> None:
    odd: list[dict[str, float | str]] = [
        {"done": float("inf"), "total": -5, "batch_rows": float("nan")},
        {"done": "all", "total": "all", "batch_rows": "\x1b[31m"},
    ]
    arrays.append(make_batch(["done", "failed"], odd))
    shown = run("batch", "many")
    assert shown.exit_code == 1
    assert "has reported no rows of a batch" in shown.stderr
    odd[0] = {"done": 9e99, "total": 50, "batch_rows": 50, "rows_per_s": 1e-300, "before_rows": 1e9}
    arrays[:] = [make_batch(["running", "failed"], odd)]
    assert "0% 0 of 50 rows, 50 of them" in run("batch", "many").stdout


def test_a_batch_needs_its_section(tmp_path: Path) -> None:
    file = tmp_path / "task.yaml"
    file.write_text("run: echo")
    refused = run("batch", str(file))
    assert refused.exit_code == 2
    assert "has no section `batch`" in refused.stderr

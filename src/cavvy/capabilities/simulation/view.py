"""Shows the results of `cavvy simulate` as tables, JSON, CSV, Parquet and plots."""

from collections.abc import Iterator, Mapping, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cavvy.cli.view.formatting import show_dollars, show_seconds
from cavvy.cli.view.output import TableColumn, json_out, pairs_out, rows_out
from cavvy.cli.view.output_file import open_output
from cavvy.domain.values import asdict

if TYPE_CHECKING:
    from cavvy.capabilities.simulation.serving.run import ServingScore
    from cavvy.capabilities.simulation.traces.fleet import QueueResult, QueueStay
    from cavvy.capabilities.simulation.traces.packing import PackedList
    from cavvy.capabilities.simulation.traces.time_sharing import SharedResult
    from cavvy.capabilities.simulation.traces.trials import PolicyScore, TrialResult

_HOUR_S = 3600.0
_COLUMNS = (
    TableColumn("policy"),
    TableColumn("work_hr", "WORK", show=lambda value: f"{value:g}h"),
    TableColumn("deadline_hr", "DEADLINE", show=lambda value: f"{value:g}h", drop=4),
    TableColumn("overhead_hr", "OVERHEAD", show=lambda value: f"{value:g}h", drop=1),
    TableColumn("cost_over_optimum_mean", "COST/OPTIMUM", show=lambda value: f"{value:.3f}"),
    TableColumn("cost_over_optimum_worst", "WORST", show=lambda value: f"{value:.3f}", drop=3),
    TableColumn("mean_usd", "MEAN COST", show=show_dollars),
    TableColumn("mean_optimum_usd", "OPTIMUM", show=show_dollars, drop=2),
    TableColumn("missed_deadlines", "MISSED"),
    TableColumn("runs"),
)
_JOB_COLUMNS = (
    TableColumn("job"),
    TableColumn("policy"),
    TableColumn("usd", "COST", show=show_dollars),
    TableColumn("optimum_usd", "OPTIMUM", show=show_dollars),
    TableColumn("end_hr", "ENDS", show=lambda value: f"{value:.1f}h"),
    TableColumn("missed", "MISSED"),
)
_STAY_FIELDS = ("pool", "gpus", "arrival_s", "start_s", "end_s")
_RUN_FIELDS = (
    "policy",
    "trace",
    "start_s",
    "work_s",
    "deadline_s",
    "overhead_s",
    "usd",
    "optimum_usd",
    "end_s",
    "missed",
    "launches",
)
_SERVING_COLUMNS = (
    TableColumn("rule"),
    TableColumn("on_time_percent", "ON TIME", show=lambda value: f"{value:.2f}%"),
    TableColumn("failed", "FAILED", drop=2),
    TableColumn("wait_p50_s", "WAIT P50", show=lambda value: f"{value:.1f}s", drop=4),
    TableColumn("wait_p90_s", "P90", show=lambda value: f"{value:.1f}s", drop=3),
    TableColumn("wait_p99_s", "P99", show=lambda value: f"{value:.1f}s"),
    TableColumn("replica_hours", "REPLICA-HOURS", show=lambda value: f"{value:.2f}"),
    TableColumn("over_bound", "OVER BOUND", show=lambda value: f"{value:.2f}"),
    TableColumn("usd", "COST", show=show_dollars),
    TableColumn("launches", drop=5),
    TableColumn("most", "MOST REPLICAS", drop=6),
    TableColumn("lost", drop=7),
)


_PACKING_COLUMNS = (
    TableColumn("jobs"),
    TableColumn("policy"),
    TableColumn("allocated_percent", "ALLOCATED", show=lambda value: f"{value:.2f}%"),
    TableColumn("published_percent", "PUBLISHED", show=lambda value: f"{value:.2f}%"),
    TableColumn("difference", show=lambda value: f"{value:+.2f}"),
)


_SHARING_COLUMNS = (
    TableColumn("policy"),
    TableColumn("jobs"),
    TableColumn("left_out", "LEFT OUT", drop=1),
    TableColumn("mean_h", "MEAN TIME", show=lambda value: f"{value:.2f}h"),
    TableColumn("preemptions"),
    TableColumn("below_share", "WAITS BELOW SHARE"),
)


def print_scores(results: "Sequence[TrialResult]", output: str) -> None:
    """Print one row for each policy and setting, then one row for each policy over all settings."""
    from cavvy.capabilities.simulation.traces.trials import ResultTally

    cells, totals = ResultTally(), ResultTally()
    for result in results:
        setting = result.setting
        cells.add((result.policy, setting.work_s, setting.deadline_s, setting.overhead_s), result)
        totals.add((result.policy, None, None, None), result)
    rows = [_score_row(key, score) for key, score in cells.scores().items()]
    if len({row[1:4] for row in rows}) > 1:
        rows += [_score_row(key, score) for key, score in totals.scores().items()]
    rows_out(_COLUMNS, rows, output)


def as_document(results: "Sequence[TrialResult]", *, segments: bool = False) -> dict[str, object]:
    """Return the results grouped by policy, and the results grouped by policy and setting. With
    `segments`, the result includes every run and its segments.
    """
    from cavvy.capabilities.simulation.traces.trials import ResultTally

    totals, cells = ResultTally(), ResultTally()
    for result in results:
        setting = result.setting
        totals.add(result.policy, result)
        cells.add((result.policy, setting.work_s, setting.deadline_s, setting.overhead_s), result)
    document: dict[str, object] = {
        "policies": {
            str(policy): _score_fields(score) for policy, score in totals.scores().items()
        },
        "cells": [
            {
                "policy": key[0],
                "work_s": key[1],
                "deadline_s": key[2],
                "overhead_s": key[3],
                **_score_fields(score),
            }
            for key, score in cells.scores().items()
            if isinstance(key, tuple)
        ],
    }
    if segments:
        document["runs"] = [_run_fields(result) for result in results]
    return document


def write_files(
    results: "Sequence[TrialResult]", csv_file: Path | None, parquet_file: Path | None
) -> None:
    """Write every run as a row."""
    rows = list(_run_rows(results))
    if csv_file is not None:
        with open_output(csv_file) as out, TextIOWrapper(out, "utf-8", newline="") as file:
            rows_out(_RUN_FIELDS, rows, "csv", file=file)
    if parquet_file is not None:
        _write_parquet(_RUN_FIELDS, rows, parquet_file)


def _write_parquet(names: Sequence[str], rows: Sequence[tuple[object, ...]], path: Path) -> None:
    import pyarrow as arrow  # type: ignore[import-untyped]  # ships no types
    from pyarrow import parquet

    columns = dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))
    parquet.write_table(arrow.table(columns), path)


def draw(results: "Sequence[TrialResult]", plot: Path | None, gantt: Path | None) -> None:
    """Draw the requested plots."""
    if plot is not None or gantt is not None:
        from cavvy.capabilities.simulation.traces.plots import plot_cost, plot_gantt

        if plot is not None:
            plot_cost(results, plot)
        if gantt is not None:
            plot_gantt(results, gantt)


def write_fleet(
    stays: "Sequence[QueueStay]", csv_file: Path | None, parquet_file: Path | None
) -> None:
    """Write every job of a queue as a row."""
    rows = [(stay.pool, stay.gpus, stay.arrival_s, stay.start_s, stay.end_s) for stay in stays]
    if csv_file is not None:
        with open_output(csv_file) as out, TextIOWrapper(out, "utf-8", newline="") as file:
            rows_out(_STAY_FIELDS, rows, "csv", file=file)
    if parquet_file is not None:
        _write_parquet(_STAY_FIELDS, rows, parquet_file)


def print_scenario(
    results: "Sequence[TrialResult]", waited: "QueueResult | None", output: str, *, segments: bool
) -> None:
    """Print the results of a scenario: its jobs on spot capacity, with one row for each job and
    policy, and its queue of jobs.
    """
    if output == "json":
        document = as_document(results, segments=segments) if results else {}
        json_out({**document, "fleet": None if waited is None else dict(_fleet_pairs(waited))})
        return
    if results:
        rows = [
            (
                each.world,
                each.policy,
                each.run.usd,
                each.optimum_usd,
                each.run.end_s / _HOUR_S,
                each.run.missed,
            )
            for each in results
        ]
        rows_out(_JOB_COLUMNS, rows, output)
    if waited is not None:
        print_fleet(waited, output)


def print_fleet(outcome: "QueueResult", output: str) -> None:
    """Print the results of a queue."""
    pairs = _fleet_pairs(outcome)
    match output:
        case "json":
            json_out(dict(pairs))
        case "csv":
            rows_out([name for name, _ in pairs], [[value for _, value in pairs]], "csv")
        case _:
            pairs_out([(_words(name), _shown(name, value)) for name, value in pairs])


def _words(name: str) -> str:
    """Return the name of a result without its unit, in words: `mean_wait_s` is "mean wait"."""
    return name.removesuffix("_s").replace("_", " ").replace("gpu", "GPU")


def _shown(name: str, value: object) -> object:
    if not isinstance(value, int | float):
        return value
    if name.endswith("_s"):
        return show_seconds(round(value))
    return f"{value:.1%}" if name == "gpu_use" else f"{value:,}"


def _fleet_pairs(outcome: "QueueResult") -> list[tuple[str, object]]:
    return [
        ("jobs", outcome.jobs),
        ("left_out", outcome.left_out),
        ("decisions", outcome.decisions),
        ("makespan_s", outcome.makespan_s),
        ("mean_wait_s", round(outcome.mean_wait_s, 1)),
        ("median_wait_s", round(outcome.median_wait_s, 1)),
        ("p95_wait_s", round(outcome.p95_wait_s, 1)),
        ("gpu_use", round(outcome.gpu_use, 4)),
    ]


def _score_row(key: object, score: "PolicyScore") -> tuple[object, ...]:
    assert isinstance(key, tuple)
    policy, *lengths = key
    hours = [length / _HOUR_S if length is not None else None for length in lengths]
    return (
        policy,
        *hours,
        score.mean,
        score.worst,
        score.mean_usd,
        score.mean_optimum_usd,
        score.missed,
        score.runs,
    )


def _score_fields(score: "PolicyScore") -> dict[str, object]:
    return {
        "cost_over_optimum": {"mean": score.mean, "worst": score.worst},
        "missed_deadlines": score.missed,
        "mean_usd": score.mean_usd,
        "mean_optimum_usd": score.mean_optimum_usd,
        "runs": score.runs,
    }


def _run_rows(results: "Sequence[TrialResult]") -> Iterator[tuple[object, ...]]:
    for result in results:
        setting, run = result.setting, result.run
        yield (
            result.policy,
            result.world,
            result.start_s,
            setting.work_s,
            setting.deadline_s,
            setting.overhead_s,
            run.usd,
            result.optimum_usd,
            run.end_s,
            run.missed,
            run.launches,
        )


def _run_fields(result: "TrialResult") -> dict[str, object]:
    (row,) = _run_rows([result])
    return {
        **dict(zip(_RUN_FIELDS, row, strict=True)),
        "files": list(result.files),
        "segments": [
            {
                "mode": segment.mode,
                "market": result.markets[segment.market] if segment.market >= 0 else None,
                "start_s": segment.start_s,
                "end_s": segment.end_s,
                "work_s": segment.work_s,
                "usd": segment.usd,
                "reason": segment.reason,
            }
            for segment in result.run.segments
        ],
    }


def print_serving(scores: "Sequence[ServingScore]", bound: float, output: str) -> None:
    """Print one row for each run. `bound` is the lower bound of the replica-hours."""
    if output == "json":
        json_out({"bound_replica_hours": bound, "runs": [asdict(each) for each in scores]})
        return
    rows = [
        (
            each.rule,
            100 * each.on_time,
            each.failed,
            *each.wait_s,
            each.replica_hours,
            each.replica_hours / bound,
            each.usd,
            each.launches,
            each.most,
            each.lost,
        )
        for each in scores
    ]
    rows_out(_SERVING_COLUMNS, rows, output)
    if output == "table":
        click.echo(f"lower bound: {bound:.2f} replica-hours")


def print_packing(
    results: "Sequence[PackedList]", published: Mapping[str, Mapping[str, float]], output: str
) -> None:
    """Print one row for each list of jobs and policy, with published results beside them."""
    rows = []
    for each in results:
        known = published.get(each.jobs, {}).get(each.policy)
        difference = None if known is None else each.percent - known
        rows.append((each.jobs, each.policy, each.percent, known, difference))
    rows_out(_PACKING_COLUMNS, rows, output)


def print_sharing(results: "Sequence[SharedResult]", output: str) -> None:
    """Print one row for each policy by which projects share a pool."""
    rows = [
        (
            each.policy,
            len(each.times_h),
            each.left_out,
            each.mean_h,
            each.preemptions,
            each.below_share,
        )
        for each in results
    ]
    rows_out(_SHARING_COLUMNS, rows, output)

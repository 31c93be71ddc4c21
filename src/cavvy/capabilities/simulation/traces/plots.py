"""Plots simulated runs: the cost by slack, the runs of one window, and the load of a fleet. Makes
an HTML page from simulated fleets: for each list of jobs a plot of the allocated against the
requested accelerators, for a shared pool a plot of the jobs' times, and tables with the results.
Requires matplotlib.
"""

from collections.abc import Mapping, Sequence
from html import escape
from io import StringIO
from itertools import groupby
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from cavvy.capabilities.simulation.traces.fleet import QueueStay
from cavvy.capabilities.simulation.traces.packing import DEMAND, PackedList
from cavvy.capabilities.simulation.traces.time_sharing import SharedResult
from cavvy.capabilities.simulation.traces.trials import ResultTally, TrialResult
from cavvy.domain.units import Money, format_usd
from cavvy.planner.spot.view import RunMode

_HOUR_S = 3600.0
_COLOURS = {RunMode.SPOT: "tab:green", RunMode.ON_DEMAND: "tab:red", RunMode.IDLE: "lightgrey"}
matplotlib.rcParams["svg.hashsalt"] = "cavvy"  # This makes the files of equal plots identical.


def plot_cost(results: Sequence[TrialResult], path: Path) -> None:
    """Plot the total cost divided by the total optimum. The x axis is the slack as a share of the
    work; each overhead has its own panel. If the optimum (the lowest possible cost) was not
    computed, the mean cost in dollars is plotted instead.
    """
    points = _score_points(results)
    overheads = sorted({key[0] for key in points})
    figure = Figure(figsize=(3.2 * len(overheads) + 1, 3.4), layout="constrained")
    axes = figure.subplots(1, len(overheads), sharey=True, squeeze=False)[0]
    for panel, overhead in zip(axes, overheads, strict=True):
        for policy in dict.fromkeys(result.policy for result in results):
            line = sorted(
                (key[2], mean) for key, mean in points.items() if key[:2] == (overhead, policy)
            )
            panel.plot(
                [100 * slack for slack, _ in line],
                [mean for _, mean in line],
                marker="o",
                label=policy,
            )
        panel.set_title(f"overhead {overhead / _HOUR_S:g} h")
        panel.set_xlabel("slack, % of the work")
        panel.grid(alpha=0.3)
    axes[0].set_ylabel(
        "cost / optimum" if results[0].optimum_usd is not None else "mean cost, dollars"
    )
    axes[0].legend()
    save_figure(figure, path)


def _score_points(results: Sequence[TrialResult]) -> dict[tuple[float, str, float], float]:
    """Return the mean score for each combination of overhead, policy and slack. If the results
    contain no optimal costs, return mean costs in dollars instead of mean scores.
    """
    tally = ResultTally()
    for result in results:
        setting = result.setting
        slack = round(setting.deadline_s / setting.work_s - 1, 4)
        tally.add((setting.overhead_s, result.policy, slack), result)
    scores = tally.scores().items()
    return {key: score.mean or score.mean_usd for key, score in scores if isinstance(key, tuple)}


def plot_gantt(results: Sequence[TrialResult], path: Path) -> None:
    """Plot the runs of the first window with the first setting, with one bar for each policy. The
    results must contain the segments of the runs.
    """
    first = results[0]
    shown = [
        each
        for each in results
        if (each.world, each.start_s, each.setting) == (first.world, first.start_s, first.setting)
    ]
    figure = Figure(figsize=(10, 0.7 * len(shown) + 1.6), layout="constrained")
    panel = figure.subplots()
    for row, result in enumerate(shown):
        for segment in result.run.segments:
            panel.barh(
                row,
                (segment.end_s - segment.start_s) / _HOUR_S,
                left=segment.start_s / _HOUR_S,
                color=_COLOURS[segment.mode],
                edgecolor="white",
                linewidth=0.3,
            )
    labels = [f"{each.policy} {_dollars(each.run.usd)}" for each in shown]
    panel.set_yticks(range(len(shown)), labels)
    panel.invert_yaxis()
    panel.axvline(first.setting.deadline_s / _HOUR_S, color="black", linestyle="--")
    panel.set_xlabel("hours since the start; dashed: the deadline")
    optimum = f", optimum {_dollars(first.optimum_usd)}" if first.optimum_usd is not None else ""
    panel.set_title(f"{first.world}{optimum}")
    for mode, colour in _COLOURS.items():
        panel.barh(0, 0, color=colour, label=mode)
    panel.legend(ncols=3, loc="upper right")
    save_figure(figure, path)


def plot_fleet(stays: Sequence[QueueStay], gpus: int, path: Path) -> None:
    """Plot the share of GPUs in use and the number of waiting jobs over time."""
    changes = sorted(
        [(stay.arrival_s, 0, 1) for stay in stays]
        + [(stay.start_s, stay.gpus, -1) for stay in stays]
        + [(stay.end_s, -stay.gpus, 0) for stay in stays]
    )
    times, used, waiting = [0.0], [0.0], [0]
    for at, more, waits in changes:
        times.append(at / (24 * _HOUR_S))
        used.append(used[-1] + more)
        waiting.append(waiting[-1] + waits)
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    above.step(
        times, [100 * each / gpus for each in used], where="post", linewidth=0.6, color="tab:green"
    )
    above.set_ylabel("% of GPUs in use")
    below.step(times, waiting, where="post", linewidth=0.6, color="tab:red")
    below.set_ylabel("waiting jobs")
    below.set_xlabel("days")
    for panel in (above, below):
        panel.grid(alpha=0.3)
    save_figure(figure, path)


def save_figure(figure: Figure, path: Path) -> None:
    """Write a plot to a file. Equal plots give identical files."""
    metadata = {"Date": None} if path.suffix == ".svg" else None
    figure.savefig(path, metadata=metadata, dpi=120)


def _dollars(usd: float) -> str:
    return format_usd(Money(round(usd * 1e6)))


_POINTS = 500  # of a line of the plot of the times

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Simulated fleet</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; color: #222 }}
table {{ border-collapse: collapse; margin: 1rem 0 2rem }}
th, td {{ padding: .25rem .6rem; border-bottom: 1px solid #ddd; text-align: right }}
th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) {{ text-align: left }}
figure {{ display: inline-block; margin: 0 1rem 1rem 0 }}
</style></head><body>
<h1>Simulated fleet</h1>
{parts}
</body></html>
"""
_PACKING = """<h2>Allocated accelerators</h2>
<p>Accelerators that jobs get if jobs that request {demand:.0%} of the cluster's accelerators arrive
and none ends. Each result is the mean of {runs} random orders of the jobs.</p>
{table}
{plots}"""
_SHARING = """<h2>Times of jobs</h2>
<p>One pool of GPUs, which several projects share. {left_out} jobs are larger than the pool or have
no known project, and are left out.</p>
{table}
{plot}"""


def make_page(
    packed: Sequence[PackedList],
    published: Mapping[str, Mapping[str, float]],
    shared: Sequence[SharedResult],
) -> str:
    """Return the page. `published` contains results to compare with, by list and policy."""
    parts = [
        *([_show_packing(packed, published)] if packed else []),
        *([_show_sharing(shared)] if shared else []),
    ]
    return _PAGE.format(parts="\n".join(parts))


def _show_packing(
    results: Sequence[PackedList], published: Mapping[str, Mapping[str, float]]
) -> str:
    plots = [
        _draw(name, list(group)) for name, group in groupby(results, key=lambda each: each.jobs)
    ]
    rows = []
    for each in results:
        known = published.get(each.jobs, {}).get(each.policy)
        rows.append(
            (
                each.jobs,
                each.policy,
                f"{each.percent:.2f}",
                "" if known is None else f"{known:.2f}",
                "" if known is None else f"{each.percent - known:+.2f}",
            )
        )
    heads = ("list of jobs", "policy", "allocated, %", "published, %", "difference")
    return _PACKING.format(
        demand=DEMAND,
        runs=len(results[0].percents),
        table=_table(heads, rows),
        plots="\n".join(plots),
    )


def _show_sharing(results: Sequence[SharedResult]) -> str:
    rows = [
        (
            each.policy,
            str(len(each.times_h)),
            f"{each.mean_h:.2f}",
            str(each.preemptions),
            "" if each.below_share is None else str(each.below_share),
        )
        for each in results
    ]
    figure = Figure(figsize=(5.4, 3.8), layout="constrained")
    panel = figure.subplots()
    for each in results:
        times = sorted(each.times_h)
        kept = range(0, len(times), max(1, len(times) // _POINTS))
        panel.plot(
            [times[at] for at in kept], [100 * at / len(times) for at in kept], label=each.policy
        )
    panel.set_xscale("log")
    panel.set_xlabel("hours from submission to end")
    panel.set_ylabel("jobs, %")
    panel.grid(alpha=0.3)
    panel.legend()
    heads = ("policy", "jobs", "mean time, h", "preemptions", "waits below the share")
    return _SHARING.format(
        left_out=results[0].left_out,
        table=_table(heads, rows),
        plot=f"<figure>{draw_inline(figure, 'times')}</figure>",
    )


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [
        "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row)
        for row, tag in zip([heads, *rows], ["th", *["td"] * len(rows)], strict=True)
    ]
    return f"<table>{''.join(f'<tr>{each}</tr>' for each in cells)}</table>"


def _draw(name: str, results: Sequence[PackedList]) -> str:
    figure = Figure(figsize=(5.4, 3.8), layout="constrained")
    panel = figure.subplots()
    for each in results:
        asked, given = zip(*each.curve, strict=True)
        panel.plot(asked, given, label=each.policy)
    panel.set_xlabel("requested, % of the cluster's accelerators")
    panel.set_ylabel("allocated, %")
    panel.set_xlim(left=70)
    panel.set_ylim(bottom=65)
    panel.grid(alpha=0.3)
    panel.legend()
    panel.set_title(name)
    return f"<figure>{draw_inline(figure, name)}</figure>"


def draw_inline(figure: Figure, name: str) -> str:
    """Return the plot as an SVG element. Equal plots give the same text; `name` keeps the names of
    its parts apart from those of other plots on the page."""
    with matplotlib.rc_context({"svg.hashsalt": name}):
        file = StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue().partition("<svg")[2].join(("<svg", ""))

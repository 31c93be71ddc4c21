"""Plots simulated runs: the cost by slack, the runs of one window, and the load of a fleet.
Requires matplotlib.
"""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from cavvy.domain.units import Money, format_usd
from cavvy.planner.spot.view import RunMode
from cavvy.sim.traces.fleet import QueueStay
from cavvy.sim.traces.trials import ResultTally, TrialResult

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

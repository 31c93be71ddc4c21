"""Plots simulated services: the cost for each share of requests that were answered in time, the
number of replicas over time, and the costs of several ways to run the same service. Requires
matplotlib.
"""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from cavvy.sim.serving.comparison import LoadCosts, WayCrossing
from cavvy.sim.serving.run import ServingScore
from cavvy.sim.traces.plots import save_figure


def plot_scores(scores: Sequence[ServingScore], bound: float, path: Path) -> None:
    """Plot the late requests against the replica-hours of each run; points further left and lower
    are better. The dashed line is the lower bound.
    """
    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    panel = figure.subplots()
    for rule in dict.fromkeys(score.rule for score in scores):
        points = sorted(
            (score.replica_hours, 100 * (1 - score.on_time))
            for score in scores
            if score.rule == rule
        )
        panel.plot(
            [hours for hours, _ in points], [late for _, late in points], marker="o", label=rule
        )
    panel.axvline(bound, color="black", linestyle="--", linewidth=0.8)
    panel.set_xlabel("replica-hours; dashed: lower bound")
    panel.set_ylabel("requests late or failed, %")
    panel.set_title(scores[0].trace)
    panel.grid(alpha=0.3)
    panel.legend()
    save_figure(figure, path)


def plot_replicas(scores: Sequence[ServingScore], path: Path) -> None:
    """Plot the ready replicas and the waiting requests of each run over time."""
    figure = Figure(figsize=(9, 5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    for score in scores:
        hours = [at / 3600.0 for at, *_ in score.history]
        above.step(hours, [each[1] for each in score.history], where="post", label=score.rule)
        below.step(hours, [each[3] for each in score.history], where="post", linewidth=0.8)
    above.set_ylabel("ready replicas")
    below.set_ylabel("waiting requests")
    below.set_xlabel("hours")
    above.legend(fontsize="small")
    for panel in (above, below):
        panel.grid(alpha=0.3)
    save_figure(figure, path)


def plot_costs(loads: Sequence[LoadCosts], crossings: Sequence[WayCrossing], path: Path) -> None:
    """Plot the monthly cost of each way to run the service against the requests per day. Dotted
    lines mark the loads at which another way becomes the cheapest. The dashed line marks the
    recorded load.
    """
    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    panel = figure.subplots()
    ordered = sorted(loads, key=lambda each: each.per_day)
    for at, first in enumerate(ordered[0].costs):
        points = [(each.per_day, each.costs[at].usd_month) for each in ordered]
        known = [(load, cost) for load, cost in points if cost is not None]
        if known:
            panel.plot(*zip(*known, strict=True), marker="o", label=first.way)
    for each in crossings:
        panel.axvline(each.per_day, color="grey", linestyle=":", linewidth=0.8)
    for load in loads:
        if load.factor == 1:
            panel.axvline(load.per_day, color="black", linestyle="--", linewidth=0.8)
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xlabel("requests per day (dashed line: recorded load)")
    panel.set_ylabel("$ per month")
    panel.grid(alpha=0.3, which="both")
    panel.legend(fontsize="small")
    save_figure(figure, path)

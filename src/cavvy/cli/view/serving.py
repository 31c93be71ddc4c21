"""Shows the results of `cavvy simulate serve`."""

from typing import TYPE_CHECKING

import click

from cavvy.cli.view.formatting import show_dollars
from cavvy.cli.view.output import TableColumn, json_out, rows_out
from cavvy.domain.values import asdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cavvy.sim.serving.run import ServingScore

_COLUMNS = (
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
    rows_out(_COLUMNS, rows, output)
    if output == "table":
        click.echo(f"lower bound: {bound:.2f} replica-hours")

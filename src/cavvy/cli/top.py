"""`cavvy nodes top`: shows what all nodes use and how far their work is, live."""

import sys
from typing import TYPE_CHECKING

import click

from cavvy.cli.down import nothing_runs
from cavvy.cli.reach.session import any_project_option
from cavvy.cli.reach.waiting import show_repeatedly
from cavvy.cli.view.output import TableColumn, output_option, rows_out

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from cavvy.client import ApiClient
    from cavvy.client.wire import NodeListing

_SORTS = ("gpu", "cpu", "memory", "power", "job")
_FIGURES = (
    "gpu_percent",
    "gpu_memory_mib",
    "gpu_power_w",
    "cpu_percent",
    "memory_mib",
    "net_in_mib_s",
    "net_out_mib_s",
    "disk_read_mib_s",
    "disk_write_mib_s",
)


@click.command("top")
@any_project_option
@click.option("--once", is_flag=True, help="Print the nodes once; without a terminal, always.")
@click.option(
    "--sort",
    type=click.Choice(_SORTS),
    default="job",
    help="Show the nodes with the highest use first, or sort by job and rank.",
)
@click.option("--gpus", is_flag=True, help="Show a line for each GPU of nodes with several.")
@output_option
def command(project: str | None, once: bool, sort: str, gpus: bool, output: str) -> None:
    """Show the use of GPUs, CPUs, memory, network and disks of all nodes, live.

    GPUs of all nodes and providers, as their agents measured them in the last ten seconds. Press
    Ctrl-C to end.
    """

    def read(client: "ApiClient") -> "list[NodeListing]":
        return client.nodes(project)

    def show(nodes: "list[NodeListing]") -> None:
        _show(sorted(nodes, key=lambda node: _order(node, sort)), project, output, gpus=gpus)

    show_repeatedly(read, show, not once and output == "table" and sys.stdout.isatty(), output)


def _order(node: "NodeListing", sort: str) -> tuple[object, ...]:
    name = {"gpu": "gpu_percent", "memory": "memory_mib", "power": "gpu_power_w"}.get(
        sort, "cpu_percent"
    )
    use = 0.0 if sort == "job" else -node.telemetry.get(name, 0.0)
    return use, node.project, node.job, node.attempt, node.rank


def _show(
    nodes: "list[NodeListing]", project: str | None, output: str, *, gpus: bool = False
) -> None:
    from cavvy.cli.view import formatting
    from cavvy.domain.figures import list_gpus

    columns = [
        TableColumn("project", drop=6),
        TableColumn("job"),
        TableColumn("user", drop=4),
        TableColumn("rank", drop=10),
        TableColumn("gpu", "GPU NO", right=True, hidden=not gpus),
        TableColumn("accelerator", "MODEL", drop=8),
        TableColumn("accelerator_count", "GPUS", lambda count: f"{count:g}", right=True, drop=9),
        *_list_figures(),
        TableColumn("progress", show=_show_progress, drop=5, cut=True),
        TableColumn("heard_at", "HEARD", formatting.show_ago, drop=3),
        TableColumn("phase", hidden=True),
        TableColumn("placement", drop=2),
        TableColumn("attempt", hidden=True),
        TableColumn("job_id", hidden=True),
    ]
    rows = [
        {column.name: getattr(node, column.name, None) for column in columns}
        | {name: node.telemetry.get(name) for name in _FIGURES}
        | values
        for node in nodes
        for values in (_list_lines(list_gpus(node.telemetry)) if gpus else [{}])
    ]
    rows_out(columns, rows, output, empty=nothing_runs(project))


def _list_lines(gpus: "list[dict[str, float]]") -> "list[dict[str, float | None]]":
    """Return what differs in the lines of a node's GPUs. Only the first one has the node's CPUs."""
    lines: list[dict[str, float | None]] = [
        dict.fromkeys(_FIGURES if number else _FIGURES[:3]) | {"gpu": number} | values
        for number, values in enumerate(gpus)
    ]
    return lines or [{"gpu": None}]


def _list_figures() -> list[TableColumn]:
    from cavvy.domain.units import format_memory

    def show_memory(mib: float) -> str:
        return format_memory(round(mib))

    shown: list[tuple[str, Callable[[float], str], int]] = [
        ("GPU", "{:.0f}%".format, 0),
        ("GPU MEM", show_memory, 0),
        ("WATTS", "{:.0f}".format, 7),
        ("CPU", "{:.0f}%".format, 0),
        ("MEM", show_memory, 0),
        ("IN MIB/S", "{:.1f}".format, 1),
        ("OUT MIB/S", "{:.1f}".format, 1),
        ("READ MIB/S", "{:.1f}".format, 1),
        ("WRITE MIB/S", "{:.1f}".format, 1),
    ]
    return [
        TableColumn(name, title, show, right=True, drop=drop)
        for name, (title, show, drop) in zip(_FIGURES, shown, strict=True)
    ]


def _show_progress(progress: "Mapping[str, float | str]") -> str:
    from cavvy.cli.view.formatting import show_progress

    return show_progress(progress) or "-"

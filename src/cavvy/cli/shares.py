"""`cavvy shares`: shows the queue by project."""

from collections.abc import Mapping, Sequence
from typing import Any

import click

from cavvy.cli.reach.session import session
from cavvy.cli.view.output import TableColumn, output_option, rows_out, text_out


def _percent(part: float) -> str:
    return f"{part:.1%}"


def _number(number: float | None) -> str:
    return "" if number is None else f"{number:g}"


def _amounts(total: float | None, by_accelerator: Mapping[str, float], micros: int | None) -> str:
    """Return a quota or a limit in one cell."""
    from cavvy.domain.policies import say_amount

    parts = [f"{number:g} {name}" for name, number in by_accelerator.items()]
    parts = [*([] if total is None else [f"{total:g}"]), *parts]
    return ", ".join([*parts, *([] if micros is None else [say_amount("$", micros)])])


def _loans(loans: Sequence[Mapping[str, Any]], direction: str) -> str:
    """Return loans in one cell, such as `4 H100 to vision`."""
    from cavvy.domain.policies import say_amount

    parts = []
    for each in loans:
        in_dollars = each["micros_per_hour"] or not each["gpus"]
        name, amount = ("$", each["micros_per_hour"]) if in_dollars else ("", each["gpus"])
        said = say_amount(each["accelerator"] or name, amount)
        parts.append(f"{said} {direction} {each['project']}")
    return ", ".join(parts)


# JSON and CSV have these fields, and tables the columns
_FIELDS = (
    *("project", "parent", "weight", "part", "used_part", "used_gpu_hours", "debt_gpu_hours"),
    *("gpus", "accelerators", "jobs", "micros_per_hour", "quota_gpus", "quota_accelerators"),
    *("quota_micros_per_hour", "max_gpus", "max_accelerators", "max_micros_per_hour"),
    *("waiting_gpus", "waiting_jobs", "lent", "borrowed"),
)
_COLUMNS = (
    TableColumn("project"),
    TableColumn("weight", show=_number, drop=2),
    TableColumn("part", "SHARE", show=_percent),
    TableColumn("used_part", "USED", show=_percent),
    TableColumn("used_gpu_hours", "GPU-HOURS", show=lambda hours: f"{hours:,.1f}", drop=3),
    TableColumn(
        "debt_gpu_hours", "DEBT", show=lambda hours: f"{round(hours, 1) + 0:+,.1f}", drop=6
    ),
    TableColumn("gpus", "GPUS", show=_number),
    TableColumn("jobs", drop=4),
    TableColumn("micros_per_hour", "$/H", show=lambda micros: f"{micros / 1e6:,.2f}", drop=7),
    TableColumn("quota"),
    TableColumn("limit", drop=1),
    TableColumn("lent", drop=8),
    TableColumn("borrowed", drop=9),
    TableColumn("waiting_gpus", "WAITING", show=_number),
    TableColumn("waiting_jobs", "JOBS WAITING", drop=5),
)


@click.command("shares")
@click.option("-p", "--project", help="Show only this project.")
@output_option
def command(project: str | None, output: str) -> None:
    """Show the queue by project: its share, its use, and what it holds and waits for.

    SHARE is the part of all use that a project should have by its weight, USED the part that it
    has. The project that has used least for its weight has the next turn. Past use decays by half
    in the time that `queue.half_life_days` sets. `cavvy policy set --share 2` changes a weight.
    DEBT are the GPU-hours that it has used beyond its share; below 0, other projects have. LENT is
    what others hold of its quota, and BORROWED what it holds of theirs.
    """
    from msgspec import to_builtins

    from cavvy.client.queue_wire import read_shares

    with session() as client:
        report = read_shares(client, project)
    rows = [to_builtins(each) for each in report.projects]
    for row, each in zip(rows, report.projects, strict=True):
        quota = each.quota_gpus, each.quota_accelerators, each.quota_micros_per_hour
        limit = each.max_gpus, each.max_accelerators, each.max_micros_per_hour
        row |= {"quota": _amounts(*quota), "limit": _amounts(*limit)}
        if output == "table":
            row |= {"lent": _loans(row["lent"], "to"), "borrowed": _loans(row["borrowed"], "of")}
    columns = _COLUMNS if output == "table" else _FIELDS
    rows_out(columns, rows, output, empty="no project uses or wants anything")
    if output == "table" and any(each.waiting_jobs for each in report.projects):
        text_out("`cavvy status JOB` shows a job's position in the queue")

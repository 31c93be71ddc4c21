"""`cavvy shares`: shows the queue by project."""

import click

from cavvy.cli.reach.session import session
from cavvy.cli.view.output import TableColumn, output_option, rows_out, text_out


def _percent(part: float) -> str:
    return f"{part:.1%}"


def _number(number: float | None) -> str:
    return "" if number is None else f"{number:g}"


_COLUMNS = (
    TableColumn("project"),
    TableColumn("parent", hidden=True),
    TableColumn("weight", show=_number, drop=2),
    TableColumn("part", "SHARE", show=_percent),
    TableColumn("used_part", "USED", show=_percent),
    TableColumn("used_gpu_hours", "GPU-HOURS", show=lambda hours: f"{hours:,.1f}", drop=3),
    TableColumn("gpus", "GPUS", show=_number),
    TableColumn("jobs", drop=4),
    TableColumn("quota_gpus", "QUOTA", show=_number),
    TableColumn("max_gpus", "LIMIT", show=_number, drop=1),
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
    """
    from cavvy.client.share_wire import read_shares

    with session() as client:
        report = read_shares(client, project)
    rows_out(_COLUMNS, report.projects, output, empty="no project uses or wants anything")
    if output == "table" and any(each.waiting_jobs for each in report.projects):
        text_out("`cavvy status JOB` shows a job's position in the queue")

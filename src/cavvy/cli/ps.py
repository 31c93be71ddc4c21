"""`cavvy ps`: lists jobs."""

from typing import TYPE_CHECKING

import click

from cavvy.cli.reach.session import any_project_option, list_jobs
from cavvy.cli.reach.watch import show_repeatedly, watch_option
from cavvy.cli.view.numbers import WholeRange
from cavvy.cli.view.output import TableColumn, output_option, rows_out

if TYPE_CHECKING:
    from cavvy.client.wire import JobListing

_RECENT = 20


@click.command("ps")
@click.option(
    "-a",
    "--all",
    "everything",
    is_flag=True,
    help="List all jobs; by default, only the newest ones are listed.",
)
@any_project_option
@click.option(
    "--phase",
    multiple=True,
    metavar="PHASE",
    help="List only jobs in this phase, such as running or failed.",
)
@click.option("-n", "--limit", type=WholeRange(1), default=None, help="Maximum number of rows.")
@watch_option
@output_option
def command(
    everything: bool,
    project: str | None,
    phase: tuple[str, ...],
    limit: int | None,
    watch: bool,
    output: str,
) -> None:
    """List jobs, newest first."""
    wanted = limit or (None if everything else _RECENT)

    def show(found: "tuple[list[JobListing], bool]") -> None:
        _jobs_out(found[0], output)
        if found[1] and output == "table" and not limit:
            click.echo("… show older jobs: cavvy ps --all")

    show_repeatedly(lambda client: list_jobs(client, project, phase, wanted), show, watch, output)


def _jobs_out(rows: "list[JobListing]", output: str) -> None:
    from cavvy.cli.view import formatting

    columns = [
        TableColumn("name"),
        TableColumn("id", hidden=True),
        TableColumn("tags", hidden=True),
        TableColumn("project", drop=2),
        TableColumn("phase"),
        TableColumn("submitted_at", "SUBMITTED", formatting.show_ago, drop=6),
        TableColumn("since", "SINCE", formatting.show_ago, hidden=True),
        TableColumn("ended_at", hidden=True),
        TableColumn("attempt", "TRY", drop=3),
        TableColumn("exit_code", "EXIT", drop=4),
        TableColumn("spent_micros", "SPENT", drop=5),
        TableColumn("machine", hidden=not any(row.machine for row in rows)),
        TableColumn("placement", drop=1),
        TableColumn("reason", cut=True),
    ]
    rows_out(columns, rows, output, empty="no jobs yet; start one with `cavvy run task.yaml`")

"""`cavvy ps`: lists jobs."""

import sys
import time
from typing import TYPE_CHECKING

import click

from cavvy.cli.reach.session import any_project_option, list_jobs, session
from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.output import TableColumn, output_option, rows_out

if TYPE_CHECKING:
    from cavvy.client.wire import JobListing

_RECENT = 20
_REFRESH_S = 2.0


@click.command("ps")
@click.option(
    "-a",
    "--all",
    "everything",
    is_flag=True,
    help="All jobs; the default is the newest ones.",
)
@any_project_option
@click.option(
    "--phase",
    multiple=True,
    metavar="PHASE",
    help="Only jobs in this phase, such as running or failed.",
)
@click.option("-n", "--limit", type=click.IntRange(1), default=None, help="Maximum number of rows.")
@click.option("-w", "--watch", is_flag=True, help="Refresh the table until you press Ctrl-C.")
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
    if watch and (output != "table" or not sys.stdout.isatty()):
        raise CommandFailure(
            "--watch needs a table on a terminal",
            "in scripts, `cavvy wait NAME` waits for a job",
            2,
        )
    with session() as client:
        while True:
            rows, more = list_jobs(client, project, phase, wanted)
            if watch:
                click.clear()
            _jobs_out(rows, output)
            if more and output == "table" and not limit:
                click.echo("… show older jobs: cavvy ps --all")
            if not watch:
                return
            time.sleep(_REFRESH_S)


def _jobs_out(rows: "list[JobListing]", output: str) -> None:
    from cavvy.cli.view import formatting

    columns = [
        TableColumn("name"),
        TableColumn("id", hidden=True),
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

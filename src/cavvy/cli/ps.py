"""`cavvy ps`: list jobs."""

import click

from cavvy.cli.reach.session import any_project_option, list_jobs, session
from cavvy.cli.view.output import TableColumn, output_option, rows_out

_RECENT = 20


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
@output_option
def command(
    everything: bool, project: str | None, phase: tuple[str, ...], limit: int | None, output: str
) -> None:
    """List jobs, newest first."""
    from cavvy.cli.view import formatting

    wanted = limit or (None if everything else _RECENT)
    with session() as client:
        rows, more = list_jobs(client, project, phase, wanted)
    columns = [
        TableColumn("name", wide=True),
        TableColumn("id", hidden=True),
        TableColumn("project"),
        TableColumn("phase"),
        TableColumn("submitted_at", "SUBMITTED", formatting.show_ago),
        TableColumn("since", "SINCE", formatting.show_ago, hidden=True),
        TableColumn("ended_at", hidden=True),
        TableColumn("attempt", "TRY"),
        TableColumn("exit_code", "EXIT"),
        TableColumn("spent_micros", "SPENT"),
        TableColumn("placement", wide=True),
        TableColumn("reason", wide=True),
    ]
    rows_out(columns, rows, output, empty="no jobs yet; start one with `cavvy run task.yaml`")
    if more and output == "table" and not limit:
        click.echo("… show older jobs: cavvy ps --all")

"""`cavvy diff`: shows how two runs differ."""

import click

from cavvy.cli.reach.session import project_option, session
from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.output import TableColumn, output_option, rows_out


@click.command("diff")
@click.argument("first")
@click.argument("second")
@project_option
@output_option
def command(first: str, second: str, project: str, output: str) -> None:
    """Show what differed between two runs: task, parameters, code, offer, versions and result."""
    from cavvy.client.comparison import compare_jobs, find_replica, show_value

    with session() as client:
        jobs = client.job(project, first), client.job(project, second)
    if replica := find_replica(*jobs):
        text = f"{first} and {second} cannot be compared: {replica} is a replica of a service"
        raise CommandFailure(text, "`cavvy ps --all` lists the jobs and their reruns")
    rows = compare_jobs(*jobs)
    if output == "table":
        rows = [(name, show_value(name, a), show_value(name, b)) for name, a, b in rows]
    columns = [
        TableColumn("field"),
        TableColumn("first", first, wrap=True),
        TableColumn("second", second, wrap=True),
    ]
    rows_out(columns, rows, output, empty="nothing differed")

"""`cavvy nodes`: lists nodes that run or are billed now."""

import click

from cavvy.cli.down import nothing_runs
from cavvy.cli.reach.session import any_project_option, session
from cavvy.cli.view.output import TableColumn, output_option, rows_out


@click.command("nodes")
@any_project_option
@output_option
def command(project: str | None, output: str) -> None:
    """List nodes that run or are billed now."""
    from cavvy.cli.view import formatting

    columns = [
        TableColumn("project", drop=3),
        TableColumn("job"),
        TableColumn("attempt", "TRY", drop=6),
        TableColumn("rank", drop=9),
        TableColumn("phase", drop=10),
        TableColumn("rank_phase", "AGENT", drop=5),
        TableColumn("placement", drop=2),
        TableColumn("devices", show=lambda ids: ",".join(ids) or "-", drop=1, cut=True),
        TableColumn("rate_micros_per_hour", "RATE"),
        TableColumn("since", show=formatting.show_ago, drop=7),
        TableColumn("kept_until", "KEPT UNTIL", formatting.show_clock, drop=8),
        TableColumn("heard_at", "HEARD", formatting.show_ago, drop=4),
        TableColumn("gang", hidden=True),
        TableColumn("job_id", hidden=True),
    ]
    with session() as client:
        rows = client.nodes(project)
        machines = client.joined() if output == "table" else []
    rows_out(columns, rows, output, empty=nothing_runs(project))
    if machines:
        click.echo(f"joined: {', '.join(f'{each.name} ({each.state})' for each in machines)}")

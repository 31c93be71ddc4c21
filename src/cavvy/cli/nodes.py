"""`cavvy nodes`: lists nodes that run or are billed now."""

import click

from cavvy.cli.reach.session import any_project_option, session
from cavvy.cli.view.output import TableColumn, output_option, rows_out


@click.command("nodes")
@any_project_option
@output_option
def command(project: str | None, output: str) -> None:
    """List nodes that run or are billed now."""
    from cavvy.cli.view import formatting

    columns = [
        TableColumn("project"),
        TableColumn("job", wide=True),
        TableColumn("attempt", "TRY"),
        TableColumn("rank"),
        TableColumn("phase"),
        TableColumn("rank_phase", "AGENT"),
        TableColumn("placement", wide=True),
        TableColumn("devices", show=lambda ids: ",".join(ids) or "-", wide=True),
        TableColumn("rate_micros_per_hour", "RATE"),
        TableColumn("since", show=formatting.show_ago),
        TableColumn(
            "kept_until", "KEPT UNTIL", lambda at: f"{at:%H:%M:%S} UTC" if at else "-", wide=True
        ),
        TableColumn("heard_at", "HEARD", formatting.show_ago),
        TableColumn("gang", hidden=True),
        TableColumn("job_id", hidden=True),
    ]
    with session() as client:
        rows = client.nodes(project)
        machines = client.machines() if output == "table" else []
    rows_out(columns, rows, output, empty="nothing is running, and nothing is billed")
    if machines:
        click.echo(f"joined: {', '.join(f'{each.name} ({each.state})' for each in machines)}")

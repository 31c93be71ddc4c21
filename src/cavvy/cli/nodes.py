"""`cavvy nodes`: lists nodes that run or bill now."""

import click

from cavvy.cli.reach.session import session
from cavvy.cli.view.output import TableColumn, output_option, rows_out


@click.command("nodes")
@click.option("-p", "--project", default=None, help="Only this project; the default is all.")
@output_option
def command(project: str | None, output: str) -> None:
    """List nodes that run or bill now."""
    from cavvy.cli.view import formatting
    from cavvy.domain.units import HourlyRate, format_rate

    columns = [
        TableColumn("project"),
        TableColumn("job", wide=True),
        TableColumn("attempt", "TRY", right=True),
        TableColumn("rank", right=True),
        TableColumn("phase"),
        TableColumn("rank_phase", "AGENT"),
        TableColumn("placement", wide=True),
        TableColumn("devices", show=lambda ids: ",".join(ids) or "-", wide=True),
        TableColumn(
            "rate_micros_per_hour",
            "RATE",
            lambda micros: format_rate(HourlyRate(micros)),
            right=True,
        ),
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
    cells = [tuple(getattr(row, column.name) for column in columns) for row in rows]
    rows_out(columns, cells, output, empty="nothing runs and nothing bills")
    if machines:
        click.echo(f"joined: {', '.join(f'{each.name} ({each.state})' for each in machines)}")

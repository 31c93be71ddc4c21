"""`cavvy nodes`: what runs or bills now."""

import click

from cavvy.cli.reach.session import session
from cavvy.cli.view.output import Column, output_option, rows_out


@click.command("nodes")
@click.option("-p", "--project", default=None, help="Only this project; all by default.")
@output_option
def command(project: str | None, output: str) -> None:
    """List nodes that run or bill now."""
    from cavvy.cli.view import shown
    from cavvy.domain.units import HourlyRate, format_rate

    columns = [
        Column("project"),
        Column("job", wide=True),
        Column("attempt", "TRY", right=True),
        Column("rank", right=True),
        Column("phase"),
        Column("rank_phase", "AGENT"),
        Column("place", wide=True),
        Column("devices", show=lambda ids: ",".join(ids) or "-", wide=True),
        Column(
            "rate_micros_per_hour",
            "RATE",
            lambda micros: format_rate(HourlyRate(micros)),
            right=True,
        ),
        Column("since", show=shown.show_ago),
        Column(
            "kept_until", "KEPT UNTIL", lambda at: f"{at:%H:%M:%S} UTC" if at else "-", wide=True
        ),
        Column("heard_at", "HEARD", shown.show_ago),
        Column("gang", hidden=True),
        Column("job_id", hidden=True),
    ]
    with session() as client:
        rows = client.nodes(project)
        machines = client.machines() if output == "table" else []
    cells = [tuple(getattr(row, column.name) for column in columns) for row in rows]
    rows_out(columns, cells, output, empty="nothing runs and nothing bills")
    if machines:
        click.echo(f"joined: {', '.join(f'{each.name} ({each.state})' for each in machines)}")

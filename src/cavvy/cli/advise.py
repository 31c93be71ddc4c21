"""`cavvy advise`: names waste, with what it costs in a month and how to end it."""

from datetime import UTC, datetime, timedelta

import click

from cavvy.cli.reach.arguments import since_option
from cavvy.cli.reach.session import any_project_option, named, session
from cavvy.cli.view import formatting
from cavvy.cli.view.output import TableColumn, output_option, rows_out

_PERIOD = timedelta(days=30)


@click.command("advise")
@any_project_option
@since_option
@output_option
def command(project: str | None, since: datetime | None, output: str) -> None:
    """Name waste in what jobs cost, with dollars in 30 days and how to end it.

    The period is from --since, by default 30 days ago, until now. Removed jobs are not judged, and
    runs shorter than an hour.
    """
    from cavvy.cli.reach.usage import list_offers_of, read_charges, read_runs
    from cavvy.cli.view.advice import describe_remedy
    from cavvy.planner.advice import advise

    until = datetime.now(UTC)
    since = since or until - _PERIOD
    with session() as client:
        runs = read_runs(client, read_charges(client, project, since, until))
    found = advise(runs, list_offers_of(run.offer.provider for run in runs), until - since)
    show = formatting.make_money_format(waste.monthly.micros for waste in found)
    columns = [
        TableColumn("job"),
        TableColumn("project", drop=1),
        TableColumn("waste"),
        TableColumn("monthly_micros", "A MONTH", show),
        TableColumn("amount_micros", hidden=True),
        TableColumn("offer", hidden=True),
        TableColumn("remedy", "END IT", wrap=True),
    ]
    rows = [
        (
            waste.job,
            waste.project,
            waste.kind,
            waste.monthly.micros,
            waste.amount.micros,
            None if waste.offer is None else waste.offer.key,
            describe_remedy(waste, named(waste.project, waste.job)),
        )
        for waste in found
    ]
    rows_out(columns, rows, output, empty="no waste was found")
    if output == "table" and rows:
        click.echo(f"total {show(sum(waste.monthly.micros for waste in found))} a month")

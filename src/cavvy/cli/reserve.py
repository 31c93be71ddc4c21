"""`cavvy reserve`: shows which commitments to clouds would save money."""

from datetime import UTC, datetime, timedelta

import click

from cavvy.cli.reach.arguments import since_option
from cavvy.cli.reach.session import any_project_option, session
from cavvy.cli.view import formatting
from cavvy.cli.view.groups import CommandGroup
from cavvy.cli.view.output import TableColumn, output_option, rows_out

_PERIOD = timedelta(days=30)


@click.group("reserve", cls=CommandGroup)
def command() -> None:
    """Find commitments to clouds that would save money. Cavvy does not buy commitments."""


@command.command("advise")
@any_project_option
@since_option
@output_option
def advise(project: str | None, since: datetime | None, output: str) -> None:
    """Show which commitments would have been cheaper than the on-demand machines that were used.

    The command reads the use of machines from the ledger, hour by hour, from --since (by default 30
    days ago) until now. The prices come from the catalog.
    """
    from cavvy.cli.reach.usage import list_offers_of, list_used_machines, read_charges
    from cavvy.planner.reservations import advise_reservations

    until = datetime.now(UTC)
    since = since or until - _PERIOD
    with session() as client:
        used = list_used_machines(read_charges(client, project, since, until))
    offers = list_offers_of(machine.kind.provider for machine in used)
    found = advise_reservations(used, offers, since, until)
    show = formatting.make_money_format(each.monthly.micros for each in found)
    columns = [
        TableColumn("provider"),
        TableColumn("region"),
        TableColumn("instance"),
        TableColumn("machines"),
        TableColumn("months"),
        TableColumn("used", show=lambda part: f"{part:.0%}", right=True),
        TableColumn("on_demand_micros_per_hour", "ON DEMAND", drop=1),
        TableColumn("rate_micros_per_hour", "COMMITTED"),
        TableColumn("monthly_micros", "SAVES A MONTH", show),
    ]
    rows = [
        (
            each.offer.provider,
            each.offer.region,
            each.offer.instance_type,
            each.machines,
            each.offer.term_months,
            round(each.used, 3),
            each.on_demand.micros_per_hour,
            each.offer.rate.micros_per_hour,
            each.monthly.micros,
        )
        for each in found
    ]
    rows_out(columns, rows, output, empty="no commitment would have saved money")

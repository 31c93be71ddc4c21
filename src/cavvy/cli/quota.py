"""`cavvy nodes quota`: shows the account's quotas, and prints commands that request more."""

import sys
from typing import TYPE_CHECKING

import click

from cavvy.cli.reach.session import session
from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.numbers import positive_option
from cavvy.cli.view.output import TableColumn, output_option, rows_out, text_out
from cavvy.domain.values import replace

if TYPE_CHECKING:
    from cavvy.client import wire

_COLUMNS = (
    TableColumn("provider"),
    TableColumn("region", show=lambda region: region or "all", drop=3),
    TableColumn("zone", drop=3),
    TableColumn("family", below=True),
    TableColumn("name", hidden=True),
    TableColumn("purchase", "BUY", drop=1),
    TableColumn("limit", show=lambda number: f"{number:g}"),
    TableColumn("used", show=lambda number: f"{number:g}"),
    TableColumn("left", show=lambda number: f"{number:g}"),
    TableColumn("unit", drop=2),
    TableColumn("request", hidden=True),
)


@click.command("quota")
@click.argument("provider", required=False)
@click.option("--region", help="Show only this region's quotas.")
@click.option("--family", help="Show only quotas whose family or name contains this text.")
@click.option("--all", "every", is_flag=True, help="Show quotas with a limit of 0, too.")
@click.option(
    "--request", is_flag=True, help="Print the provider's commands that request higher limits."
)
@positive_option("--to", help="The limit to request. [default: the placeholder NEW_LIMIT]")
@output_option
def command(
    provider: str | None,
    region: str | None,
    family: str | None,
    every: bool,
    request: bool,
    to: float | None,
    output: str,
) -> None:
    """Show the limit and the current use of the account's quotas at each provider.

    Jobs are placed only on machines that fit into the remaining quotas. --request prints the
    provider's own command for each quota that is shown; Cavvy does not run the command.
    """
    with session() as client:
        report = client.quotas(provider)
    rows = [each for each in report.quotas if _is_wanted(each, region, family)]
    shown = [each for each in rows if each.limit or every or request or family]
    if request:
        _print_untold(report)
        _print_requests(shown, to)
        return
    # most clouds have no quotas for a part of a region
    none = not any(each.zone for each in shown)
    columns = [
        replace(each, hidden=each.hidden or (none and each.name == "zone")) for each in _COLUMNS
    ]
    rows_out(columns, shown, output, empty="no quotas are known")
    if output == "table" and (hidden := len(rows) - len(shown)):
        are = "1 quota has" if hidden == 1 else f"{hidden} quotas have"
        text_out(f"{are} a limit of 0 and therefore no row; `cavvy nodes quota --all` shows all")
    _print_untold(report)


def _print_untold(report: "wire.QuotaReport") -> None:
    """Print on standard error the providers whose quotas are unknown, with the reasons."""
    told = {each.provider for each in report.quotas}
    for each in report.untold:
        which = "some" if each.provider in told else "the"
        text_out(f"note: {which} quotas of {each.provider} are unknown: {each.reason}", sys.stderr)


def _is_wanted(row: "wire.QuotaRow", region: str | None, family: str | None) -> bool:
    """Return whether a quota passes the filters. A quota that covers all regions passes every
    region filter.
    """
    names = f"{row.family}\n{row.name}".lower()
    return row.region in ("", region or row.region) and (family or "").lower() in names


def _print_requests(rows: "list[wire.QuotaRow]", to: float | None) -> None:
    from cavvy.domain.offers import NEW_LIMIT

    if not rows:
        raise CommandFailure("no quota is selected", "`cavvy nodes quota --all` lists all quotas")
    for row in rows:
        wanted = NEW_LIMIT if to is None else f"{to:g}"
        click.echo(row.request.replace(NEW_LIMIT, wanted))

"""`cavvy cost`: what was spent, by job or project."""

from typing import TYPE_CHECKING

import click

from cavvy.cli.reach.session import list_jobs, project_option, session
from cavvy.cli.view.output import TableColumn, json_out, output_option, pairs_out, rows_out

if TYPE_CHECKING:
    from cavvy.client.wire import CostView, JobDetail


@click.command("cost")
@click.argument("name", required=False)
@project_option
@output_option
def command(name: str | None, project: str, output: str) -> None:
    """Show what was spent: for one job, every charge and its time by phase; without NAME, the
    total of each job.
    """
    with session() as client:
        if name is not None:
            _job_out(client.job(project, name), client.cost(project, name), output)
            return
        rows, _ = list_jobs(client, project)
    from cavvy.cli.view import formatting

    columns = [
        TableColumn("name", wide=True),
        TableColumn("id", hidden=True),
        TableColumn("phase"),
        TableColumn("submitted_at", "SUBMITTED"),
        TableColumn("spent_micros", "SPENT", formatting.show_money, right=True),
    ]
    cells = [(row.name, row.id, row.phase, row.submitted_at, row.spent_micros) for row in rows]
    rows_out(columns, cells, output, title=f"project {project}", empty="no jobs yet")
    if output == "table" and rows:
        click.echo(f"total {formatting.show_money(sum(row.spent_micros for row in rows))}")


def _job_out(job: "JobDetail", cost: "CostView", output: str) -> None:
    from cavvy.cli.view import formatting, summary

    elsewhere = summary.price_counterfactuals(job, cost) if output != "csv" else []
    tags = formatting.tags_of(job)
    if output == "json":
        import msgspec

        same = [
            {"offer": e.offer.key, "cost_micros": e.cost.micros, "basis": e.basis}
            for e in elsewhere
        ]
        json_out({**msgspec.to_builtins(cost), "tags": tags, "elsewhere": same})
        return
    columns = _charge_columns()
    rows = [tuple(getattr(charge, column.name) for column in columns) for charge in cost.charges]
    rows_out(columns, rows, output, empty="nothing was charged")
    if output == "table":
        click.echo()
        own = [("tags", formatting.show_tags(tags))] if tags else []
        pairs_out([*own, ("time", summary.time_text(cost)), ("bill", summary.bill_text(job, cost))])
        if elsewhere:
            click.echo()
            summary.elsewhere_out(elsewhere)


def _charge_columns() -> list[TableColumn]:
    from cavvy.cli.view.formatting import show_money
    from cavvy.domain.units import HourlyRate, format_rate

    return [
        TableColumn("attempt", "TRY", right=True),
        TableColumn("rank", right=True),
        TableColumn("kind"),
        TableColumn("since", "FROM (UTC)"),
        TableColumn("until", "TO (UTC)"),
        TableColumn(
            "rate_micros_per_hour",
            "RATE",
            lambda micros: format_rate(HourlyRate(micros)),
            right=True,
        ),
        TableColumn("amount_micros", "AMOUNT", show_money, right=True),
    ]

"""`cavvy cost`: shows what was spent, by job or project."""

from collections import defaultdict
from datetime import datetime
from typing import TYPE_CHECKING

import click

from cavvy.cli.reach.arguments import complete_jobs, since_option
from cavvy.cli.reach.session import list_jobs, project_option, session
from cavvy.cli.view import formatting, summary
from cavvy.cli.view.output import TableColumn, json_out, output_option, pairs_out, rows_out

if TYPE_CHECKING:
    from cavvy.client.wire import AuditReport, CostView, JobDetail, SpendingRow


_AUDIT_COLUMNS = (
    TableColumn("job"),
    TableColumn("attempt", "TRY"),
    TableColumn("placement", drop=1),
    TableColumn("billed_micros", "BILLED"),
    TableColumn("unsure_micros", "UNSURE", drop=2),
    TableColumn("reported_micros", "PROVIDER"),
    TableColumn("verdict"),
    TableColumn("gang", hidden=True),
)


@click.command("cost")
@click.argument("name", required=False, shell_complete=complete_jobs)
@project_option
@since_option
@click.option(
    "--by",
    type=click.Choice(["job", "tag", "project", "user", "provider"]),
    help="What to add the costs up by. Removed jobs are included; `project` covers all projects.",
)
@click.option(
    "--audit", is_flag=True, help="Compare the bills of ended attempts with the providers' records."
)
@output_option
def command(
    name: str | None, project: str, since: datetime | None, by: str | None, audit: bool, output: str
) -> None:
    """Show what was spent. With NAME, show every charge of the job and its time by phase. Without
    NAME, show the total of each job. --since and --by sum the costs of several jobs.

    With --audit, the exit code is 1 if a bill differs from its provider's record or a provider does
    not answer.
    """
    if (since or by) and (name or audit):
        raise click.UsageError(
            "--since and --by cannot be used with NAME or --audit, because they add up jobs"
        )
    with session() as client:
        if since or by:
            rows = client.spending(None if by == "project" else project, since=since)
            _spending_out(rows, by or "job", output)
            return
        if audit:
            _audit_out(client.audit(project, name), output)
            return
        if name is not None:
            _job_out(client.job(project, name), client.cost(project, name), output)
            return
        jobs, _ = list_jobs(client, project)

    show = formatting.make_money_format(job.spent_micros for job in jobs)
    columns = [
        TableColumn("name"),
        TableColumn("id", hidden=True),
        TableColumn("phase", drop=2),
        TableColumn("submitted_at", "SUBMITTED", drop=1),
        TableColumn("spent_micros", "SPENT", show),
        TableColumn("tags", show=formatting.show_tags, wrap=True, drop=3),
    ]
    rows_out(columns, jobs, output, title=f"project {project}", empty="no jobs yet")
    if output == "table" and jobs:
        click.echo(f"total {show(sum(job.spent_micros for job in jobs))}")


def _spending_out(rows: "list[SpendingRow]", by: str, output: str) -> None:
    groups: defaultdict[str, list[SpendingRow]] = defaultdict(list)
    for row in rows:
        tags = [f"{name}={value}" for name, value in row.tags.items()]
        for key in (tags or ["-"]) if by == "tag" else [str(getattr(row, by)) or "-"]:
            groups[key].append(row)
    cells = [
        (key, len({(row.project, row.job) for row in found}), _total(found))
        for key, found in groups.items()
    ]
    show = formatting.make_money_format(cell[2] for cell in cells)
    columns = [TableColumn(by), TableColumn("jobs"), TableColumn("spent_micros", "SPENT", show)]
    cells.sort(key=lambda cell: -cell[2])
    rows_out(columns, cells, output, empty="nothing was charged")
    if output == "table" and rows:
        several = ", which counts a job with several tags only once" if by == "tag" else ""
        click.echo(f"total {show(_total(rows))}{several}")


def _total(rows: "list[SpendingRow]") -> int:
    return sum(row.amount_micros for row in rows)


def _audit_out(report: "AuditReport", output: str) -> None:
    rows_out(_AUDIT_COLUMNS, report.bills, output, empty="no attempt has ended yet")
    for problem in report.problems:
        click.echo(f"not compared: {problem}", err=True)
    if report.problems or any(bill.verdict == "differs" for bill in report.bills):
        raise SystemExit(1)


def _job_out(job: "JobDetail", cost: "CostView", output: str) -> None:
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
    show = formatting.make_money_format(charge.amount_micros for charge in cost.charges)
    columns = [
        TableColumn("attempt", "TRY"),
        TableColumn("rank", drop=2),
        TableColumn("kind", drop=1),
        TableColumn("since", "FROM"),
        TableColumn("until", "TO"),
        TableColumn("rate_micros_per_hour", "RATE", drop=3),
        TableColumn("amount_micros", "AMOUNT", show),
    ]
    rows_out(columns, cost.charges, output, empty="nothing was charged")
    if output == "table":
        click.echo()
        own = [("tags", formatting.show_tags(tags))] if tags else []
        bill = summary.bill_text(job, cost, show)
        pairs_out([*own, ("time", summary.time_text(cost)), ("bill", bill)])
        if elsewhere:
            click.echo()
            summary.elsewhere_out(elsewhere)

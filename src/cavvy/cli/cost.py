"""`cavvy cost`: shows spending by job, project or other dimensions."""

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from cavvy.cli.reach.arguments import complete_jobs, since_option, until_option
from cavvy.cli.reach.names import find_named
from cavvy.cli.reach.session import any_project_option, list_jobs, project_option, session
from cavvy.cli.view import formatting, summary
from cavvy.cli.view.output import TableColumn, json_out, output_option, pairs_out, rows_out
from cavvy.client.metrics import describe_energy
from cavvy.client.token_prices import rate_apis, rate_tokens, show_rate
from cavvy.domain.units import format_energy, format_grams
from cavvy.domain.values import replace

if TYPE_CHECKING:
    from cavvy.client import ApiClient
    from cavvy.client.array_wire import ArrayDetail
    from cavvy.client.ledger_wire import LedgerSumView
    from cavvy.client.wire import AuditReport, CostView, JobDetail
    from cavvy.costs.reconcile import Difference
    from cavvy.domain.ledger import LedgerLine

_T = TypeVar("_T")
_RECENT = 20  # jobs in a table, as in `cavvy ps`
_DIMENSIONS = (
    "project",
    "user",
    "job",
    "machine",
    "service",
    "key",
    "model",
    "volume",
    "provider",
    "account",
    "region",
    "zone",
    "instance",
    "gpu",
    "purchase",
    "kind",
    "month",
    "tag",
)
# the models of a service share its replicas, and those of an API its price
_SHARED = ("service", "provider")
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


_ENERGY_COLUMNS = (
    TableColumn("energy_j", "ENERGY", format_energy, drop=1, right=True),
    TableColumn("co2_g", "CO2", format_grams, drop=1, right=True),
)
_TOKENS = ("prompt", "cached", "completion", "estimated")
_TOKEN_COLUMNS = (
    TableColumn("prompt_tokens", "PROMPT", "{:,}".format, drop=2),
    TableColumn("cached_tokens", "CACHED", "{:,}".format, drop=3),
    TableColumn("completion_tokens", "COMPLETION", "{:,}".format, drop=2),
    TableColumn("estimated_tokens", hidden=True),
    TableColumn("micros_per_million_tokens", "PER 1M", show_rate),
)
_API_COLUMNS = (
    TableColumn("api_micros_per_million_tokens", "API 1M", show_rate, drop=1),
    TableColumn("api", "CHEAPEST API", drop=2),
)


class _CostGroup(click.Group):
    """A group whose command `show` can be omitted: a word that is not a command is the name of a
    job.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] not in ("--help", "-h")):
            args = ["show", *args]
        return super().parse_args(ctx, args)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return super().get_command(ctx, cmd_name) or self.commands["show"]


@click.group("cost", cls=_CostGroup)
def command(**options: object) -> None:
    """Show spending. If no command is given, `show` runs with the given options and job."""


def _read_by(ctx: click.Context, param: click.Parameter, value: str | None) -> list[str]:
    names = [] if value is None else [name.strip() for name in value.split(",")]
    for name in names:
        if name not in _DIMENSIONS and not (name.startswith("tag:") and name != "tag:"):
            known = ", ".join(_DIMENSIONS)
            raise click.BadParameter(f"{name!r} is not one of {known} or tag:NAME")
    if "tag" in names and len(names) > 1:
        raise click.BadParameter(
            "`tag` cannot be combined with other names; use tag:NAME to "
            "combine the values of one tag with them"
        )
    if "model" in names and len({*names} - {"model", *_SHARED}) > 2:
        raise click.BadParameter("`model` can be combined with two other names")
    return names


@command.command("show")
@click.argument("name", required=False, shell_complete=complete_jobs)
@project_option
@since_option
@until_option
@click.option(
    "--by",
    metavar="NAMES",
    callback=_read_by,
    help="Group the costs by project, user, job, machine, service, key, model, volume, provider, "
    "account, region, zone, instance, gpu, purchase, kind, month, tag (each tag) or tag:NAME; up "
    "to four names, separated by commas. Removed jobs are included. `--by project` covers all "
    "projects whose spending you may see. The cost of replicas with several models is divided "
    "among them by their tokens.",
)
@click.option(
    "--audit", is_flag=True, help="Compare the bills of ended attempts with the providers' records."
)
@click.option(
    "-a",
    "--all",
    "everything",
    is_flag=True,
    help="List all jobs; by default, tables contain only the newest ones.",
)
@output_option
def show(
    name: str | None,
    project: str,
    since: datetime | None,
    until: datetime | None,
    by: list[str],
    audit: bool,
    everything: bool,
    output: str,
) -> None:
    """Show spending. With NAME, show every charge of the job and its time by phase, or the cost of
    each job of an array or each replica of a service. Without NAME, show the newest jobs and the
    total of the project. --since, --until and --by add up the ledger.

    With --audit, the exit code is 1 if a bill differs from its provider's record or a provider does
    not answer.
    """
    if (since or until or by) and (name or audit):
        raise click.UsageError(
            "--since, --until and --by cannot be used with NAME or --audit, because these "
            "options apply to sums over jobs"
        )
    _check_period(since, until)
    with session() as client:
        if since or until or by:
            _sums_out(client, project, (since, until), by or ["job"], output)
            return
        if audit:
            _audit_out(client.audit(project, name), output)
            return
        if name is not None:
            _named_out(client, project, name, output)
            return
        _jobs_out(client, project, output, everything=everything)


command.params.extend(each for each in show.params if isinstance(each, click.Option))


def _named_out(client: "ApiClient", project: str, name: str, output: str) -> None:
    """Print the cost of a job, an array or a service, also of a service that has ended."""
    from cavvy.client import ApiError
    from cavvy.client.array_wire import ArrayDetail
    from cavvy.client.wire import JobDetail

    try:
        found = _unless_refused(lambda: find_named(client, project, name))
    except ApiError as error:
        if error.code != "job-not-found" or not _service_out(client, project, name, output):
            raise
        return
    if isinstance(found, ArrayDetail):
        _array_out(found, output)
    elif found is None or isinstance(found, JobDetail):
        _job_out(found, client.cost(project, name if found is None else found.id), output)
    elif not _service_out(client, project, name, output):
        rows_out(_REPLICA_COLUMNS, [], output, empty=f"nothing was charged for {name} yet")


_REPLICA_COLUMNS = (TableColumn("job", "REPLICA"), TableColumn("spent_micros", "SPENT"))


def _service_out(client: "ApiClient", project: str, name: str, output: str) -> bool:
    """Print what each replica of a service has cost. Return False if the ledger has no charge of a
    service of this name."""
    from cavvy.client.ledger_wire import sum_ledger

    rows = sum_ledger(client, ["service", "job"], project=project)
    found = [each for each in rows if each.groups["service"] == name]
    total = sum(each.amount_micros for each in found)
    show = formatting.make_money_format([*(each.amount_micros for each in found), total])
    columns = [_REPLICA_COLUMNS[0], TableColumn("spent_micros", "SPENT", show)]
    cells = [(each.groups["job"] or "-", each.amount_micros) for each in found]
    if not found:
        return False
    rows_out(columns, cells, output, title=f"service {name}")
    if output == "table":
        click.echo(f"total {show(total)}")
    return True


def _array_out(found: "ArrayDetail", output: str) -> None:
    """Print the cost of each job of an array."""
    show = formatting.make_money_format(
        [*(job.spent_micros for job in found.jobs), found.array.spent_micros]
    )
    columns = [
        TableColumn("name"),
        TableColumn("id", hidden=True),
        TableColumn("phase"),
        TableColumn("attempt", "TRIES"),
        TableColumn("spent_micros", "SPENT", show),
    ]
    what = "group" if found.group else "array"
    rows_out(columns, found.jobs, output, title=f"{what} {found.array.name}")
    if output == "table":
        click.echo(f"total {show(found.array.spent_micros)}")


def _jobs_out(client: "ApiClient", project: str, output: str, *, everything: bool) -> None:
    # programs get every job; people need no table of 100,000 jobs
    limit = None if everything or output != "table" else _RECENT
    found = _unless_refused(lambda: list_jobs(client, project, limit=limit))
    if found is None:
        _sums_out(client, project, (None, None), ["job"], output)
        return
    jobs, is_cut = found
    whole = total = sum(job.spent_micros for job in jobs)
    if output == "table":
        whole = client.project_cost(project).total_micros
    show = formatting.make_money_format([*(job.spent_micros for job in jobs), whole])
    columns = [
        TableColumn("name"),
        TableColumn("id", hidden=True),
        TableColumn("phase", drop=2),
        TableColumn("submitted_at", "SUBMITTED", drop=1),
        TableColumn("spent_micros", "SPENT", show),
        TableColumn("tags", show=formatting.show_tags, wrap=True, drop=3),
    ]
    rows_out(columns, jobs, output, title=f"project {project}", empty="no jobs yet")
    if output != "table":
        return
    if is_cut:
        click.echo("… show older jobs: cavvy cost --all")
        click.echo(f"total {show(whole)} for all jobs and volumes of project {project}")
        return
    if jobs:
        click.echo(f"total {show(total)}")
    if show(whole) != show(total):
        click.echo(f"total {show(whole)} with removed jobs and volumes of project {project}")


def _unless_refused(look: Callable[[], _T]) -> _T | None:
    """Return the result, or None if the caller may see only costs (for example, with the role
    billing).
    """
    from cavvy.client import ApiError

    try:
        return look()
    except ApiError as error:
        if error.code not in ("role-needed", "scope-needed"):
            raise
        return None


def _check_period(since: datetime | None, until: datetime | None) -> None:
    if since and until and since >= until:
        raise click.UsageError(
            f"--until, {until:%Y-%m-%d %H:%M} UTC, is not after --since, {since:%Y-%m-%d %H:%M} UTC"
        )


def _sums_out(
    client: "ApiClient",
    project: str,
    period: tuple[datetime | None, datetime | None],
    by: list[str],
    output: str,
) -> None:
    from cavvy.client.ledger_wire import sum_ledger

    asked = ["tags" if name == "tag" else name for name in by if name != "model"]
    if "model" in by:
        asked = [*dict.fromkeys([*asked, *_SHARED])]
    where = None if "project" in by else project
    rows = sum_ledger(client, asked, project=where, since=period[0], until=period[1])
    if "model" in by:
        rows = _split_models(rows, by)
    total = sum(row.amount_micros for row in rows)
    cells = _split_tags(rows) if by == ["tag"] else [_cells(row, by) for row in rows]
    show = formatting.make_money_format(cell[-1] for cell in cells)
    discounted = any(row.discount_micros for row in rows)
    tokens = by != ["tag"] and any(row.tokens for row in rows)
    energy = by != ["tag"] and any(row.energy for row in rows)
    columns = [
        *(TableColumn(name) for name in by),
        TableColumn("jobs"),
        TableColumn("discount_micros", "DISCOUNT", show, hidden=not discounted),
        TableColumn("spent_micros", "SPENT", show),
    ]
    if energy:
        columns += _ENERGY_COLUMNS
        cells = [(*cell, *_energy_cells(row)) for cell, row in zip(cells, rows, strict=True)]
    if tokens:
        columns += _TOKEN_COLUMNS
        cells = [(*cell, *_count_tokens(row)) for cell, row in zip(cells, rows, strict=True)]
        apis = [next(iter(rate_apis(row.tokens)), None) for row in rows]
        if any(apis) or output == "json":
            columns += _API_COLUMNS
            found = [(None, None) if each is None else each[::-1] for each in apis]
            cells = [(*cell, *each) for cell, each in zip(cells, found, strict=True)]
    rows_out(columns, cells, output, empty="nothing was charged")
    if output == "table" and rows:
        several = " (a job with several tags is counted only once)" if by == ["tag"] else ""
        click.echo(f"total {show(total)}{several}")
        if energy and (unplaced := sum(row.energy.unplaced_j for row in rows if row.energy)):
            click.echo(f"{format_energy(unplaced)} in regions of unknown countries have no CO2")


def _energy_cells(row: "LedgerSumView") -> tuple[int | None, float | None]:
    """Return the joules of a group, and the grams of CO2 if the grid of any part is known."""
    if row.energy is None:
        return None, None
    return row.energy.joules, row.energy.co2_g if row.energy.grids else None


def _count_tokens(row: "LedgerSumView") -> tuple[Any, ...]:
    """Return the tokens of a group, and the micro-dollars of everything that was spent, with cold
    starts and idle time, for a million of them.
    """
    sums = (sum(getattr(each, name) for each in row.tokens) for name in _TOKENS)
    return (*sums, rate_tokens(row.amount_micros, row.tokens))


def _cells(row: "LedgerSumView", by: list[str]) -> tuple[Any, ...]:
    keys = (row.groups[name] or "-" for name in by)
    return (*keys, row.jobs, row.discount_micros, row.amount_micros)


def _split_tags(rows: "list[LedgerSumView]") -> list[tuple[Any, ...]]:
    """Return a row for each tag. The cost of a job with several tags is included in the row of each
    of its tags.
    """
    import json

    found: dict[str, list[int]] = {}
    for row in rows:
        tags = [f"{name}={value}" for name, value in json.loads(row.groups["tags"]).items()]
        for tag in tags or ["-"]:
            sums = found.setdefault(tag, [0, 0, 0])
            for i, more in enumerate((row.jobs, row.discount_micros, row.amount_micros)):
                sums[i] += more
    return sorted(((tag, *sums) for tag, sums in found.items()), key=lambda cell: -cell[-1])


def _split_models(rows: "list[LedgerSumView]", by: list[str]) -> "list[LedgerSumView]":
    """Return a row for each model of each group of `by`. What was spent on a service is divided
    exactly, in proportion to the tokens of its models, whose requests share replicas.
    """
    from cavvy.costs.discounts import spread

    found: dict[tuple[str, ...], LedgerSumView] = {}
    for row in rows:
        sizes = {each.model: each.prompt + each.completion for each in row.tokens}
        if not any(sizes.values()):
            sizes = {"": 1}
        amounts, discounts = (
            {name: sign * part for name, part in spread(sign * micros, sizes).items()}
            for micros in (row.amount_micros, row.discount_micros)
            for sign in [-1 if micros < 0 else 1]
        )
        for name in sizes:
            groups = {each: name if each == "model" else row.groups[each] for each in by}
            key = tuple(groups.values())
            old = found.get(key)
            found[key] = replace(
                row,
                groups=groups,
                jobs=row.jobs + (old.jobs if old else 0),
                amount_micros=amounts[name] + (old.amount_micros if old else 0),
                discount_micros=discounts[name] + (old.discount_micros if old else 0),
                tokens=[*(old.tokens if old else ()), *(t for t in row.tokens if t.model == name)],
                energy=None,
            )
    return sorted(found.values(), key=lambda each: -each.amount_micros)


def _read_month(ctx: click.Context, param: click.Parameter, value: str) -> datetime:
    from cavvy.domain.ledger import next_month

    try:
        month = datetime.strptime(value, "%Y-%m").replace(tzinfo=UTC)
        next_month(month)  # the last month of the calendar has no end
        return month
    except (ValueError, OverflowError):
        raise click.BadParameter(f"expected a month such as 2026-11, not {value!r}") from None


@command.command("statement")
@project_option
@click.option(
    "--month", required=True, metavar="YYYY-MM", callback=_read_month, help="The month, in UTC."
)
@click.option(
    "-o",
    "--output",
    "file",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file to write: .html for a page, .csv or .parquet for rows in FOCUS 1.0.",
)
def statement(project: str, month: datetime, file: Path) -> None:
    """Write the statement of a project for a month, from the ledger.

    Rows in CSV and Parquet follow the FinOps Open Cost and Usage Specification (FOCUS).
    """
    from cavvy.client.ledger_wire import list_entries, to_line
    from cavvy.costs.statements import make_statement, month_period, total_of
    from cavvy.domain.units import format_count

    if file.suffix not in _STATEMENTS:
        raise click.UsageError(f"the name of the file must end with {', '.join(_STATEMENTS)}")
    since, until = month_period(month)
    with session() as client:
        entries = list_entries(client, project=project, since=since, until=until)
        lines = make_statement(map(to_line, entries), since, until)
    _write_statement(file, f"Project {project}, {month:%B %Y}", (since, until), lines)
    show = formatting.make_money_format([total_of(lines).micros])
    count = format_count(len(lines), "line")
    click.echo(f"{file}: {count}, total {show(total_of(lines).micros)}")


_STATEMENTS = (".html", ".csv", ".parquet")


def _write_statement(
    file: Path, title: str, period: tuple[datetime, datetime], lines: "Sequence[LedgerLine]"
) -> None:
    from io import TextIOWrapper

    from cavvy.cli.view.failure import CommandFailure
    from cavvy.cli.view.output_file import check_output, open_output
    from cavvy.cli.view.statement import write_csv, write_page, write_parquet

    try:
        check_output(file)
        if file.suffix == ".parquet":
            write_parquet(file, lines)
            return
        with open_output(file) as to, TextIOWrapper(to, "utf-8", newline="") as out:
            if file.suffix == ".csv":
                write_csv(out, lines)
            else:
                write_page(out, title, period, lines)
    except ImportError as error:
        from cavvy.packages import extra_command

        hint = f"install pyarrow with `{extra_command('parquet')}`, or write a .csv file"
        raise CommandFailure("Parquet needs the package pyarrow", hint) from error
    except OSError as error:
        raise CommandFailure(f"{file} cannot be written: {error.strerror}") from error


@command.command("meters")
@output_option
def meters(output: str) -> None:
    """Show which kinds of use the ledger meters at which providers, and which use the ledger cannot
    observe, with the reason. Needs no server.
    """
    from cavvy.costs.meters import METERS

    columns = [
        TableColumn("kind"),
        TableColumn("providers", drop=1),
        TableColumn("source", "METERED", wrap=True),
        TableColumn("missing", "NOT OBSERVED", wrap=True),
    ]
    rows = [(each.kind, ", ".join(each.providers), each.source, each.missing) for each in METERS]
    rows_out(columns, rows, output, empty="")


def _read_map(
    ctx: click.Context, param: click.Parameter, values: tuple[str, ...]
) -> dict[str, str]:
    pairs = [value.partition("=") for value in values]
    for name, equals, column in pairs:
        if not (name and equals and column):
            raise click.BadParameter(f"expected FIELD=COLUMN, not {name!r}")
    return {name: column for name, _, column in pairs}


@command.command("reconcile")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--provider",
    "form",
    type=click.Choice(["aws", "azure", "gcp", "csv"]),
    help="The format of the bill; by default, detected from the columns.",
)
@click.option(
    "--map",
    "columns",
    multiple=True,
    metavar="FIELD=COLUMN",
    callback=_read_map,
    help="For a bill in another format: the column of a field. Required: amount, since and gang; "
    "optional: until, resource, kind, category, hours, currency and id; "
    "`zone=+02:00` is the UTC offset of times. Repeatable.",
)
@click.option("--of", "provider", metavar="NAME", help="The bill's provider, as in the ledger.")
@any_project_option
@since_option
@until_option
@output_option
def reconcile(
    file: Path,
    form: str | None,
    columns: dict[str, str],
    provider: str | None,
    project: str | None,
    since: datetime | None,
    until: datetime | None,
    output: str,
) -> None:
    """Compare a cloud's bill with the ledger, by resource, day and kind.

    The command reads AWS Cost and Usage Reports (CSV, and CUR 2.0 in CSV or Parquet), Azure cost
    exports, and Google's detailed billing export (CSV or lines of JSON). For bills in other
    formats, name the columns with --map. Files may be compressed with gzip. By default, the bill
    and the ledger are compared for the days of the bill. The dates of --since and --until are days
    in UTC, like the days of the bill. The exit code is 1 if there are differences.
    """
    from cavvy.cli.reach.bills import BillFileError
    from cavvy.cli.reach.reconciliation import reconcile_file
    from cavvy.cli.view.failure import CommandFailure

    _check_period(since, until)
    with session() as client:
        try:
            report = reconcile_file(client, file, form, columns, provider, (since, until))
        except BillFileError as error:
            raise CommandFailure(str(error), error.hint) from error
        except ImportError as error:
            from cavvy.packages import extra_command

            hint = f"install pyarrow with `{extra_command('parquet')}`, or use a .csv file"
            raise CommandFailure("Parquet needs the package pyarrow", hint) from error
    found = [each for each in report.found if project is None or each.project in ("", project)]
    _differences_out(found, output)
    if output == "table":
        from cavvy.domain.units import format_count

        click.echo(
            f"{report.title}, {report.since:%Y-%m-%d} to {report.until:%Y-%m-%d} (UTC): "
            f"{format_count(report.lines, 'line')} compared with "
            f"{format_count(report.charges, 'charge')} of the ledger, "
            f"{format_count(len(found), 'difference')}"
        )
    if found:
        raise SystemExit(1)


def _differences_out(found: "Sequence[Difference]", output: str) -> None:
    from cavvy.cli.reach.reconciliation import explain_difference
    from cavvy.costs.bills import USD

    rows = [
        (
            each.day,
            each.job or "-",
            each.resource or "-",
            each.kind or "-",
            each.ledger_micros,
            each.bill_micros,
            each.billed_in,
            each.more_micros,
            each.cause,
            " ".join(map(str, each.lines)),
            explain_difference(each),
        )
        for each in found
    ]
    amounts = [each for row in rows for each in (row[4], row[5]) if isinstance(each, int)]
    show = formatting.make_money_format(amounts)
    foreign = any(each.billed_in != USD for each in found)
    columns = [
        TableColumn("day", show=str),
        TableColumn("job"),
        TableColumn("resource", drop=3),
        TableColumn("kind", drop=2),
        TableColumn("ledger_micros", "LEDGER", show),
        TableColumn("bill_micros", "BILL", _without_sign(show) if foreign else show),
        TableColumn("currency", hidden=not foreign),
        TableColumn("more_micros", "MORE", show),
        TableColumn("cause"),
        TableColumn("lines", drop=4),
        TableColumn("text", "WHY", wrap=True, drop=1),
    ]
    rows_out(columns, rows, output, empty="the bill and the ledger agree")


def _without_sign(show: Callable[[int], str]) -> Callable[[int], str]:
    return lambda micros: show(micros).replace("$", "")


def _audit_out(report: "AuditReport", output: str) -> None:
    rows_out(_AUDIT_COLUMNS, report.bills, output, empty="no attempt has ended yet")
    for problem in report.problems:
        click.echo(f"not compared: {problem}", err=True)
    if report.problems or any(bill.verdict == "differs" for bill in report.bills):
        raise SystemExit(1)


def _job_out(job: "JobDetail | None", cost: "CostView", output: str) -> None:
    """`job` is None if the caller may not see the job."""
    elsewhere = summary.price_counterfactuals(job, cost) if job and output != "csv" else []
    tags = {} if job is None else formatting.tags_of(job)
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
        used = [("energy", describe_energy(cost.energy))] if cost.energy else []
        pairs_out([*own, ("time", summary.time_text(cost)), ("bill", bill), *used])
        if elsewhere:
            click.echo()
            summary.elsewhere_out(elsewhere)

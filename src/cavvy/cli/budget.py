"""`cavvy cost budget`: manages budgets of projects, users and tags."""

from typing import TYPE_CHECKING

import click

from cavvy.cli.reach.session import (
    USUAL_PROJECT,
    call_server,
    find_project_note,
    project_option,
    session,
)
from cavvy.cli.view import formatting
from cavvy.cli.view.failure import CommandFailure, note_out
from cavvy.cli.view.groups import CommandGroup
from cavvy.cli.view.numbers import read_usd
from cavvy.cli.view.output import TableColumn, json_option, output_option, pairs_out, rows_out

if TYPE_CHECKING:
    from cavvy.client.policy_wire import BudgetView

_NEVER = "never"


@click.group("budget", cls=CommandGroup)
def command() -> None:
    """Limit what a project, a user, the jobs with a tag, or a service may spend in a month.

    When the spending reaches the budget's soft percentage, no new paid work starts. At the hard
    percentage, running jobs save a checkpoint and stop, and services end their replicas.
    """


def _read_percent(ctx: click.Context, param: click.Parameter, value: str) -> int | None:
    from cavvy.domain.units import is_whole

    text = value.removesuffix("%")
    if value == _NEVER:
        return None
    if not is_whole(text):
        raise click.BadParameter(f"expected a percentage such as 90%, or never, not {value!r}")
    return int(text)


@command.command("set")
@click.argument("name")
@click.argument("amount", metavar="USD", callback=read_usd)
@click.option("--project", default="", help="Only jobs of this project.")
@click.option("--user", default="", help="Only jobs of this user.")
@click.option("--tag", default="", metavar="NAME=VALUE", help="Only jobs with this tag.")
@click.option("--service", default="", metavar="NAME", help="Only replicas of this service.")
@click.option(
    "--alert",
    "alerts",
    multiple=True,
    metavar="PERCENT",
    default=("50%", "80%", "100%"),
    show_default=True,
    help="Send an alert at this share of the budget; repeatable.",
)
@click.option(
    "--soft",
    metavar="PERCENT",
    default="100%",
    show_default=True,
    callback=_read_percent,
    help="The share of the budget at which no new paid work starts, or never.",
)
@click.option(
    "--hard",
    metavar="PERCENT",
    default=_NEVER,
    show_default=True,
    callback=_read_percent,
    help="The share of the budget at which running jobs stop, or never.",
)
@click.option(
    "--carry-over",
    is_flag=True,
    help="Add the amount that was not spent in the last month to the budget of this month.",
)
@click.option("--webhook", default="", metavar="URL", help="Send alerts to this URL.")
def set_budget(
    name: str,
    amount: int,
    alerts: tuple[str, ...],
    soft: int | None,
    hard: int | None,
    carry_over: bool,
    **texts: str,
) -> None:
    """Set the budget NAME to an amount for each month. Omitted options have their defaults."""
    from cavvy.client.policy_wire import BudgetAsk, put_budget
    from cavvy.domain.units import is_whole

    if not all(is_whole(each.removesuffix("%")) for each in alerts):
        raise click.UsageError("--alert takes percentages, such as 80%")
    ask = BudgetAsk(
        limit_micros=amount,
        alerts=[int(each.removesuffix("%")) for each in alerts],
        soft_percent=soft,
        hard_percent=hard,
        carry_over=carry_over,
        **texts,
    )
    with session() as client:
        put_budget(client, name, ask)
        undo = f"`cavvy cost budget remove {name}` removes the budget"
        note = find_project_note(client, ask.project, undo)
    from cavvy.domain.units import Money, format_usd

    kinds = ("project", "user", "tag", "service")
    covered = [f"{kind} {texts[kind]}" for kind in kinds if texts.get(kind)]
    of = f"the jobs of {' and '.join(covered)}" if covered else "all jobs of all projects"
    click.echo(f"the budget {name} is set: {format_usd(Money(amount))} a month for {of}")
    if not texts.get("project") and name == USUAL_PROJECT:
        note_out(
            f"{name} is only the budget's name; --project {name} limits the project", err=False
        )
    label = next((kind for kind in ("tag", "service") if texts.get(kind)), "")
    if label and not (texts.get("project") or texts.get("user")):
        note_out(
            f"jobs of all projects with this {label} count together, so that one project can "
            "use up the budget and stop the jobs of another; --project NAME or --user NAME limits "
            "it to one"
        )
    if note:
        click.echo(note, err=True)


@command.command("list")
@output_option
def list_all(output: str) -> None:
    """List the budgets with the amounts spent this month."""
    from cavvy.client.policy_wire import list_budgets

    with session() as client:
        found = list_budgets(client)
    show = formatting.make_money_format(
        micros for each in found for micros in (each.spent_micros, each.month_limit_micros)
    )
    columns = [
        TableColumn("name"),
        TableColumn("project", drop=3),
        TableColumn("user", drop=3),
        TableColumn("tag", drop=3),
        TableColumn("service", drop=3),
        TableColumn("spent_micros", "SPENT", show),
        TableColumn("month_limit_micros", "LIMIT", show),
        TableColumn("expected_micros", "FORECAST", show, drop=1),
        TableColumn("soft_percent", "SOFT", "{}%".format, drop=2),
        TableColumn("hard_percent", "HARD", "{}%".format, drop=2),
    ]
    rows_out(columns, found, output, empty="there are no budgets")


@command.command("show")
@click.argument("name")
@json_option
def show(name: str, output: str) -> None:
    """Show a budget, with a forecast for the end of the month."""
    from cavvy.client.policy_wire import list_budgets

    with session() as client:
        found = next((each for each in list_budgets(client) if each.name == name), None)
    if found is None:
        raise CommandFailure(
            f"there is no budget {name}", "`cavvy cost budget list` lists the budgets"
        )
    if output == "json":
        import msgspec

        from cavvy.cli.view.output import json_out

        json_out(msgspec.to_builtins(found))
        return
    pairs_out(_describe(found))


def _describe(budget: "BudgetView") -> list[tuple[str, object]]:
    amounts = [budget.spent_micros, budget.month_limit_micros]
    amounts += [budget.request.limit_micros] if budget.request is not None else []
    usd = formatting.make_money_format(amounts)
    scope = [("project", budget.project), ("user", budget.user), ("tag", budget.tag)]
    scope.append(("service", budget.service))
    forecast = "unknown, because there are fewer than two days of spending"
    if budget.expected_micros is not None:
        low, high = usd(budget.low_micros or 0), usd(budget.high_micros or 0)
        forecast = (
            f"{usd(budget.expected_micros)} ({low} to {high} with a probability of about 80 %)"
        )
    rows: list[tuple[str, object]] = [(head, text) for head, text in scope if text]
    rows += [
        ("spent", f"{usd(budget.spent_micros)} of {usd(budget.month_limit_micros)} this month"),
        ("forecast", forecast),
        ("alerts", ", ".join(f"{each}%" for each in budget.alerts) or "none"),
        ("soft stop", _share(budget.soft_percent)),
        ("hard stop", _share(budget.hard_percent)),
    ]
    if budget.request is not None:
        asked = budget.request
        text = f"{usd(asked.limit_micros)} by {asked.account or 'the owner'}"
        rows.append(("requested", f"{text}: {asked.reason}" if asked.reason else text))
    return rows


def _share(percent: int | None) -> str:
    return _NEVER if percent is None else f"at {percent}%"


@command.command("remove")
@click.argument("name")
def remove(name: str) -> None:
    """Remove a budget. Jobs that wait because of the budget may start."""
    from cavvy.client.policy_wire import delete_budget

    call_server(delete_budget, name)
    click.echo(f"the budget {name} is removed")


@command.command("request")
@click.argument("name")
@click.argument("amount", metavar="USD", callback=read_usd)
@project_option
@click.option("--reason", default="", help="Why the amount is needed.")
def request(name: str, amount: int, project: str, reason: str) -> None:
    """Request a new amount for a budget. `cavvy cost budget approve` approves the request."""
    from cavvy.client.policy_wire import BudgetRequestAsk, request_amount
    from cavvy.domain.units import Money

    with session() as client:
        ask = BudgetRequestAsk(limit_micros=amount, reason=reason)
        request_amount(client, project, name, ask)
    usd = f"{Money(amount).usd:f}"
    click.echo(f"the amount is requested; `cavvy cost budget approve {name} {usd}` approves it")


@command.command("approve")
@click.argument("name")
@click.argument("amount", metavar="USD", callback=read_usd)
def approve(name: str, amount: int) -> None:
    """Approve the requested amount of a budget (see `cavvy cost budget show`).

    The command fails if the requested amount has changed.
    """
    from cavvy.client.policy_wire import BudgetApprovalAsk, approve_request
    from cavvy.domain.units import Money, format_usd

    call_server(approve_request, name, BudgetApprovalAsk(limit_micros=amount))
    click.echo(f"the budget {name} is now {format_usd(Money(amount))} a month")

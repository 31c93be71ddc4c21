"""`cavvy notify`: sends messages about events of jobs and budgets to Slack, Teams, mail, PagerDuty
and webhooks.
"""

import sys
from typing import TYPE_CHECKING

import click

from cavvy.capabilities.notices.events import list_events
from cavvy.capabilities.notices.notice import explain_events
from cavvy.cli.reach.session import call_server, project_option, session
from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.groups import CommandGroup, NameArgument
from cavvy.cli.view.output import TableColumn, output_option, rows_out

if TYPE_CHECKING:
    from cavvy.client import ApiClient

_CHANNELS = ("slack", "teams", "email", "pagerduty", "webhook")
_DEFAULT = "failed,stuck,budget"
_ADDRESSES = {
    "slack": "the URL of an incoming webhook",
    "teams": "the URL of a workflow that posts webhook requests",
    "email": "smtps://USER:PASSWORD@HOST/TO?from=FROM",
    "pagerduty": "the integration key (Events API v2)",
    "webhook": "a URL",
}
_target_argument = click.argument(
    "name", cls=NameArgument, listing="`cavvy notify list` lists the targets"
)


@click.group(
    "notify",
    cls=CommandGroup,
    help=f"""Send messages about events of jobs and budgets to Slack, Teams, mail, PagerDuty or a
    webhook.

    The events are {explain_events()}. Each message is sent at least once: a failed message is sent
    again for about 15 hours, also by a restarted server.
    """,
)
def command() -> None:
    pass


def _read_events(ctx: click.Context, param: click.Parameter, value: str) -> list[str]:
    known, names = list_events(), [each.strip() for each in value.split(",") if each.strip()]
    if wrong := [each for each in names if each not in known]:
        raise click.BadParameter(f"{wrong[0]!r} is no event; expected {', '.join(known)}")
    return names or list(known)


@command.command("add")
@click.argument("channel", type=click.Choice(_CHANNELS))
@click.option("--name", help="The target's name; the default is the channel.")
@click.option(
    "--on",
    "events",
    default=_DEFAULT,
    show_default=True,
    callback=_read_events,
    metavar="EVENTS",
    help="The events, separated by commas.",
)
@click.option("--mine", is_flag=True, help="Only about your own jobs and budgets.")
@click.option("--user", default="", help="Only about jobs and budgets of this user.")
@project_option
def add(
    channel: str, name: str | None, events: list[str], mine: bool, user: str, project: str
) -> None:
    """Add a target, or replace the target of this name, and send it a test message.

    The address is read from a prompt or a pipe, because it contains a secret: the URL of a webhook,
    the key of PagerDuty, or smtps://USER:PASSWORD@HOST/TO?from=FROM for mail. The server encrypts
    the address and never shows it. With --mine, every member of the project may add a target.
    """
    from cavvy.capabilities.notices.wire import NoticeAsk, put_notice

    name, address = name or channel, _read_address(channel)
    with session() as client:
        who = _name_caller(client) if mine else user
        ask = NoticeAsk(channel=channel, address=address, events=events, user=who)
        put_notice(client, project, name, ask)
        click.echo(f"{name}: notices of project {project} go to {channel}: {', '.join(events)}")
        _test(client, project, name)


@command.command("list")
@project_option
@output_option
def list_targets(project: str, output: str) -> None:
    """List where a project's notices are sent, and which target has a problem."""
    from cavvy.capabilities.notices.wire import list_notices

    rows = call_server(list_notices, project)
    columns = [
        TableColumn("name"),
        TableColumn("channel"),
        TableColumn("events", show=", ".join),
        TableColumn("user", show=lambda user: user or "all"),
        TableColumn("problem", wrap=True),
        TableColumn("updated_at", "SET AT", drop=1),
    ]
    empty = f"project {project} sends no notices; `cavvy notify add` adds a target"
    rows_out(columns, rows, output, empty=empty)


@command.command("test")
@_target_argument
@project_option
def send_test(name: str, project: str) -> None:
    """Send a test message to a target."""
    with session() as client:
        _test(client, project, name)


@command.command("rm")
@_target_argument
@project_option
def remove(name: str, project: str) -> None:
    """Remove a target, and the messages that wait for it."""
    from cavvy.capabilities.notices.wire import delete_notice

    call_server(delete_notice, project, name)
    click.echo(f"{name} gets no more notices of project {project}")


def _test(client: "ApiClient", project: str, name: str) -> None:
    """Send a test message. Raises CommandFailure if it is not delivered."""
    from cavvy.capabilities.notices.wire import send_test

    if problem := send_test(client, project, name).problem:
        raise CommandFailure(
            f"the test message to {name} was not delivered: {problem}",
            "`cavvy notify add` sets another address; `cavvy notify test` tries again",
        )
    click.echo(f"a test message was delivered to {name}")


def _name_caller(client: "ApiClient") -> str:
    """Return the name that the caller's jobs have."""
    import getpass

    from cavvy.client.account_wire import AccountClient

    return AccountClient(client).whoami().account or getpass.getuser()


def _read_address(channel: str) -> str:
    if sys.stdin.isatty():
        address = str(click.prompt(f"address ({_ADDRESSES[channel]})", hide_input=True))
    else:
        address = sys.stdin.read(4096)
    if not address.strip():
        raise CommandFailure(
            "the address is empty",
            f"pass {_ADDRESSES[channel]} through a pipe, or enter it when asked",
            exit_code=2,
        )
    return address.strip()

"""`cavvy reservations`: reserves own hosts and GPUs for projects."""

import getpass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from cavvy.cli.reach.arguments import complete_hosts
from cavvy.cli.reach.session import any_project_option, session
from cavvy.cli.view import formatting
from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.groups import CommandGroup, NameArgument
from cavvy.cli.view.numbers import count_option, read_length
from cavvy.cli.view.output import TableColumn, output_option, rows_out

if TYPE_CHECKING:
    from cavvy.client.maintenance_wire import ReservationView


@click.group("reservations", cls=CommandGroup)
def command() -> None:
    """Reserve own hosts or GPUs for a project and a time.

    From the begin to the end, only jobs of the project, and of the projects below it, run there.
    Before the begin, other jobs start there only if their time limit (`limits: {duration: 2h}`)
    ends before it.
    """


@command.command("add")
@click.option("-p", "--project", required=True, help="The project for which to reserve.")
@click.option("--user", default="", help="Reserve only for this user of the project.")
@click.option(
    "--nodes",
    default="",
    metavar="NODE,NODE",
    help="The hosts to reserve.",
    shell_complete=complete_hosts,
)
@count_option("--gpus", metavar="N", help="Reserve N GPUs of any host.")
@click.option("--from", "begin", default="now", metavar="TIME", help="The begin, in local time.")
@click.option("--for", "length", required=True, metavar="TIME", help="The length, such as 4h.")
@click.option("--name", default="", help="The name; the default is the project with a number.")
@click.option("--reason", default="", metavar="TEXT", help="Why.")
@click.option("--drain", is_flag=True, help="Let work leave that may still run there at the begin.")
def add(
    project: str,
    user: str,
    nodes: str,
    gpus: int | None,
    begin: str,
    length: str,
    name: str,
    reason: str,
    drain: bool,
) -> None:
    """Reserve hosts (--nodes) or a number of GPUs (--gpus).

    If other work may still run there at the begin, the reservation is refused, unless --drain lets
    this work leave: it gets its notice before the begin, saves a checkpoint, and goes on elsewhere.
    """
    from cavvy.client.maintenance_wire import ReservationAsk, add_reservation

    hosts = [each.strip() for each in nodes.split(",") if each.strip()]
    if bool(hosts) == (gpus is not None):
        raise CommandFailure("give --nodes or --gpus, and not both", exit_code=2)
    ask = ReservationAsk(
        project=project,
        user=user,
        name=name,
        nodes=hosts,
        gpus=gpus or 0,
        begins_at=_read_begin(begin),
        length_s=read_length(length, "--for").total_seconds(),
        reason=reason,
        made_by=getpass.getuser(),
        moves=drain,
    )
    with session() as client:
        made = add_reservation(client, ask)
    click.echo(f"reservation {made.name}: {_say_parts(made)} for project {made.project}")
    click.echo(
        f"from {formatting.show_time(made.begins_at)} to {formatting.show_time(made.ends_at)}"
    )


@command.command("list")
@any_project_option
@output_option
def list_all(project: str | None, output: str) -> None:
    """List reservations that have not ended."""
    from cavvy.client.maintenance_wire import list_reservations

    with session() as client:
        found = list_reservations(client, project)
    now = datetime.now(UTC)
    rows = [
        {
            "name": each.name,
            "state": "active" if each.begins_at <= now else "planned",
            "project": each.project,
            "user": each.user,
            "what": _say_parts(each),
            "begins_at": each.begins_at,
            "ends_at": each.ends_at,
            "made_by": each.made_by,
            "reason": each.reason,
        }
        for each in found
    ]
    columns = [
        TableColumn("name"),
        TableColumn("state", drop=2),
        TableColumn("project"),
        TableColumn("user", drop=3),
        TableColumn("what", wrap=True),
        TableColumn("begins_at", "FROM", formatting.show_time),
        TableColumn("ends_at", "TO", formatting.show_time),
        TableColumn("made_by", "BY", drop=4),
        TableColumn("reason", drop=1, cut=True),
    ]
    rows_out(columns, rows, output, empty="no reservations; make one with `cavvy reservations add`")


@command.command("rm")
@click.argument("name", cls=NameArgument, listing="`cavvy reservations list` lists reservations")
def remove(name: str) -> None:
    """Give what is reserved back."""
    from cavvy.client.maintenance_wire import delete_reservation

    with session() as client:
        delete_reservation(client, name)
    click.echo(f"reservation {name} is removed")


def _read_begin(text: str) -> datetime:
    if text == "now":
        return datetime.now(UTC)
    try:
        return datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise CommandFailure(
            f"--from {text}: expected a local date and time such as 2026-12-01T08:00, or now",
            exit_code=2,
        ) from error


def _say_parts(found: "ReservationView") -> str:
    from cavvy.domain.units import format_count

    return ", ".join(
        f"{format_count(len(part.devices), 'GPU')} of {part.host}" if part.devices else part.host
        for part in found.parts
    )

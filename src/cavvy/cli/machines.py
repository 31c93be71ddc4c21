"""`cavvy machines`: lists, starts, stops, keeps and forgets named machines."""

import getpass
import time
from typing import TYPE_CHECKING

import click

from cavvy.cli.reach.arguments import machine_argument
from cavvy.cli.reach.session import any_project_option, named, project_option, session
from cavvy.cli.task.load import yes_option
from cavvy.cli.view.failure import confirm
from cavvy.cli.view.groups import CommandGroup
from cavvy.cli.view.output import TableColumn, output_option, rows_out

if TYPE_CHECKING:
    from cavvy.client import ApiClient

_yes_option = click.option(
    "-y", "--yes", is_flag=True, help="Do not ask for confirmation before jobs are stopped."
)
_LOOK_AGAIN_S = 0.2
_QUIET_S = 5  # seconds of waiting before a message names the reason


@click.group("machines", cls=CommandGroup, invoke_without_command=True)
@any_project_option
@output_option
@click.pass_context
def command(context: click.Context, project: str | None, output: str) -> None:
    """List named machines with their price and cost. `cavvy run --machine NAME` runs a job on the
    machine NAME and creates the machine if it does not exist.

    A machine stays, and is billed, while it waits for the next job. The machine is released when it
    has been idle for its keep time.
    """
    if context.invoked_subcommand is not None:
        return
    from cavvy.cli.view import formatting

    with session() as client:
        rows = client.machines(project)
    columns = [
        TableColumn("name"),
        TableColumn("project", hidden=len({row.project for row in rows}) < 2),
        TableColumn("state"),
        TableColumn("job", drop=2),
        TableColumn("waiting", hidden=True),
        TableColumn("nodes", hidden=True),
        TableColumn("has", drop=3),
        TableColumn("placement", "WHERE", drop=1),
        TableColumn("since", show=formatting.show_ago, drop=4),
        TableColumn("kept_until", "IDLE UNTIL", formatting.show_clock),
        TableColumn("keep_s", hidden=True),
        TableColumn("rate_micros_per_hour", "PRICE"),
        TableColumn("spent_micros", "COST"),
        TableColumn("user", hidden=True),
    ]
    rows_out(
        columns,
        rows,
        output,
        empty="no machines yet; create one with `cavvy run --machine NAME -- COMMAND`",
    )


@command.command("start")
@machine_argument
@project_option
@yes_option
def start(name: str, project: str, yes: bool) -> None:
    """Start a stopped machine with new nodes, on the best offer for its last request.

    The old nodes' disks are lost, and the machine's setup runs again.
    """
    from cavvy.cli.task.submission import ask_consent

    with session() as client:
        found = client.machine(project, name)
        if found.state not in ("stopped", "stopping"):
            click.echo(f"machine {name} is already started: it is {found.state}")
            return
        job = ask_consent(
            yes,
            lambda consent: client.start_machine(
                project, name, user=getpass.getuser(), consent=consent
            ),
        )
    click.echo(f"job {job.name} starts machine {name}")
    click.echo(f"follow it: cavvy logs -f {named(project, job.name)}")


@command.command("stop")
@machine_argument
@project_option
@_yes_option
def stop(name: str, project: str, yes: bool) -> None:
    """Stop a machine: its jobs end and its nodes are released, but its name and its request are
    kept. Files on the nodes are lost, except outputs, checkpoints and volumes.
    """
    with session() as client:
        _stop(client, project, name, yes)
    click.echo(
        f"machine {name} is stopped; `cavvy machines start {named(project, name)}` restarts it"
    )


@command.command("keep")
@machine_argument
@click.argument("length", metavar="TIME")
@project_option
def keep(name: str, length: str, project: str) -> None:
    """Change the time for which a machine without work is kept, such as 2h. If the machine is idle,
    the new keep time starts now.
    """
    from cavvy.cli.task.options import read_value
    from cavvy.cli.view import formatting

    keep_s = read_value("TIME", "keep", length).keep.total_seconds()
    with session() as client:
        found = client.keep_machine(project, name, keep_s=keep_s)
    # The time is earlier than requested if the job's budget is spent sooner.
    if found.kept_until is not None:
        click.echo(f"machine {name} is kept until {formatting.show_time(found.kept_until)}")
    else:
        click.echo(f"machine {name} is kept for {length} without work if its budget allows that")


@command.command("rm")
@machine_argument
@project_option
@_yes_option
def remove(name: str, project: str, yes: bool) -> None:
    """Stop a machine and forget its name and request."""
    with session() as client:
        _stop(client, project, name, yes)
        client.delete_machine(project, name)
    click.echo(f"machine {name} is removed")


def _stop(client: "ApiClient", project: str, name: str, yes: bool) -> None:
    """Stop the machine and wait until it has no nodes and no unfinished jobs."""
    found = client.machine(project, name)
    busy = found.state in ("busy", "starting")
    if (busy or found.waiting) and not yes:
        jobs = found.waiting + busy
        confirm(f"stop {jobs} job{'' if jobs == 1 else 's'} of machine {name}?")
    client.stop_machine(project, name)
    told = time.monotonic() + _QUIET_S
    while True:
        found = client.machine(project, name)
        if found.state == "stopped" and not found.waiting:
            return
        if time.monotonic() > told:
            click.echo(f"waiting until the nodes of machine {name} are released", err=True)
            told = float("inf")
        time.sleep(_LOOK_AGAIN_S)

"""`cavvy nodes join` and `cavvy nodes joined`: print a shell command that turns a machine into a
node, and list and dismiss the machines that were added in this way.
"""

import click

from cavvy.cli.reach.session import session
from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.formatting import show_time
from cavvy.cli.view.groups import CommandGroup
from cavvy.cli.view.numbers import NumberRange
from cavvy.cli.view.output import TableColumn, output_option, rows_out


@click.command("join")
@click.option("--name", default=None, help="The machine's name; the default is its host name.")
@click.option(
    "--group",
    default=None,
    help="Machines of the same group share a network and can run one job together.",
)
@click.option(
    "--label",
    "labels",
    multiple=True,
    metavar="NAME=VALUE",
    help="Where the machine is, such as rack=r1, for the key `topology` of tasks; repeatable.",
)
@click.option(
    "--valid-h",
    default=1.0,
    type=NumberRange(0.01, 720),
    help="Hours until the command expires.",
)
@click.option(
    "--session",
    "session_length",
    metavar="TIME",
    help="The machine ends this long after it has joined, such as 12h for a notebook of Colab. Its "
    "nodes count as spot, and jobs leave two minutes before the end.",
)
@click.option(
    "--notebook",
    is_flag=True,
    help="Print a command for a notebook cell, for example in Google Colab.",
)
@click.option(
    "--python",
    "by_python",
    is_flag=True,
    help="Print a command for machines that have Python but no curl.",
)
@click.option(
    "--background", is_flag=True, help="Keep the machine joined after its shell is closed."
)
def command(
    name: str | None,
    group: str | None,
    labels: tuple[str, ...],
    valid_h: float,
    session_length: str | None,
    notebook: bool,
    by_python: bool,
    background: bool,
) -> None:
    """Print a shell command. The machine that runs the command becomes a node.

    The machine must be able to connect to this server. The machine need not accept connections. The
    printed command adds one machine and cannot be used for another machine.
    """
    if wrong := next((each for each in labels if "=" not in each), None):
        raise CommandFailure(f"--label {wrong}: expected NAME=VALUE, such as rack=r1", exit_code=2)
    session_s = 0.0
    if session_length is not None:
        from cavvy.cli.task.options import read_value

        session_s = read_value("--session", "keep", session_length).keep.total_seconds()
        if group is not None:
            raise CommandFailure("--session and --group cannot be combined", exit_code=2)
    located = dict(each.split("=", 1) for each in labels)
    with session() as client:
        made = client.invite(
            name=name, group=group, labels=located, valid_s=valid_h * 3600, session_s=session_s
        )
    line = made.python if by_python else made.shell
    if background:  # The two kinds of command pass this script option in different ways.
        before, after = (
            ('"--",', '"--","--background",')
            if by_python
            else ("sh -s -- ", "sh -s -- --background ")
        )
        line = line.replace(before, after)
    click.echo(("!" if notebook else "") + line)
    click.echo(f"valid for one machine until {show_time(made.expires_at)}", err=True)


@click.group("joined", cls=CommandGroup, invoke_without_command=True)
@output_option
@click.pass_context
def joined_command(context: click.Context, output: str) -> None:
    """List the machines that were added with `cavvy nodes join`."""
    if context.invoked_subcommand is not None:
        return
    from cavvy.cli.view import formatting

    columns = [
        TableColumn("name"),
        TableColumn("state"),
        TableColumn("heard_at", "HEARD", formatting.show_ago, drop=2),
        TableColumn("joined_at", "JOINED", formatting.show_ago, drop=1),
        TableColumn("has", wrap=True),
    ]
    with session() as client:
        rows = client.joined()
    rows_out(
        columns,
        rows,
        output,
        empty="no machine has joined; `cavvy nodes join` prints a command that joins a machine",
    )


@joined_command.command("dismiss")
@click.argument("name")
def dismiss(name: str) -> None:
    """Dismiss a machine: its job is preempted, and its token is revoked."""
    with session() as client:
        client.dismiss(name)
    click.echo(f"{name} is dismissed")

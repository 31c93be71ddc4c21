"""`cavvy joined`: lists and dismisses machines that were added with `cavvy join`."""

import click

from cavvy.cli.reach.session import session
from cavvy.cli.view.groups import CommandGroup
from cavvy.cli.view.output import TableColumn, output_option, rows_out


@click.group("joined", cls=CommandGroup, invoke_without_command=True)
@output_option
@click.pass_context
def command(context: click.Context, output: str) -> None:
    """List the machines that were added with `cavvy join`."""
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
        empty="no machine has joined; `cavvy join` prints a command that joins a machine",
    )


@command.command("dismiss")
@click.argument("name")
def dismiss(name: str) -> None:
    """Dismiss a machine: its job is preempted, and its token is revoked."""
    with session() as client:
        client.dismiss(name)
    click.echo(f"{name} is dismissed")

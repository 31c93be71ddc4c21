"""`cavvy context`: the servers that this user signed in to."""

import os

import click

from cavvy.cli.reach.session import failures
from cavvy.cli.view.groups import CommandGroup
from cavvy.cli.view.output import TableColumn, output_option, rows_out


@click.group("context", cls=CommandGroup)
def command() -> None:
    """List the servers that you signed in to, and choose the server that commands use.

    `cavvy login` adds a server. `local` is this machine's own server. `cavvy --context NAME` and
    CAVVY_CONTEXT choose a server for one command or one shell.
    """


@command.command("list")
@output_option
def list_contexts(output: str) -> None:
    """List the servers; an asterisk marks the server that commands use."""
    from cavvy.client.contexts import LOCAL, read_contexts
    from cavvy.client.state import default_home

    with failures():
        contexts = read_contexts(default_home())
    used = os.environ.get("CAVVY_CONTEXT") or contexts.current
    listed = [(LOCAL, "this machine"), *((each.name, each.address) for each in contexts.contexts)]
    rows = [
        {"used": name == used, "name": name, "address": address} for name, address in sorted(listed)
    ]
    columns = [
        TableColumn("used", "", lambda used: "*" if used else ""),
        TableColumn("name"),
        TableColumn("address", wrap=True),
    ]
    rows_out(columns, rows, output, empty="")


@command.command("use")
@click.argument("name")
def use(name: str) -> None:
    """Make later commands use this server; `local` is the server of this machine."""
    from cavvy.client.contexts import read_contexts, write_contexts
    from cavvy.client.state import default_home

    with failures():
        write_contexts(default_home(), read_contexts(default_home()).switched(name))
    click.echo(f"commands use {name} now")
    chosen = os.environ.get("CAVVY_CONTEXT")
    if chosen and chosen != name:
        click.echo(f"note: CAVVY_CONTEXT is set to {chosen}, overriding this choice", err=True)

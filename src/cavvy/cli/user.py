"""`cavvy user`: manages the accounts of people and services."""

import click

from cavvy.cli.reach.session import session
from cavvy.cli.view.groups import CommandGroup
from cavvy.cli.view.output import TableColumn, output_option, rows_out


@click.group("user", cls=CommandGroup)
def command() -> None:
    """Add, list and remove accounts of people and services.

    A new account has no roles. `cavvy role grant` grants roles to an account, and `cavvy token
    create --user NAME` creates the token with which an account signs in.
    """


@command.command("add")
@click.argument("name")
@click.option("--service", is_flag=True, help="The account of a program, such as a CI system.")
def add(name: str, service: bool) -> None:
    """Add an account."""
    from cavvy.client.account_wire import AccountClient

    with session() as client:
        AccountClient(client).add_account(name, "service" if service else "user")
    click.echo(f"{name} is added; `cavvy role grant {name} member -p PROJECT` grants a role")


@command.command("list")
@output_option
def list_users(output: str) -> None:
    """List the accounts."""
    from cavvy.cli.view import formatting
    from cavvy.client.account_wire import AccountClient

    columns = [
        TableColumn("name"),
        TableColumn("kind"),
        TableColumn("created_at", "ADDED", formatting.show_ago),
        TableColumn("disabled_at", "DISABLED", formatting.show_ago),
    ]
    with session() as client:
        rows = AccountClient(client).accounts()
    rows_out(columns, rows, output, empty="no accounts; `cavvy user add NAME` adds one")


@command.command("disable")
@click.argument("name")
def disable(name: str) -> None:
    """Refuse an account's tokens and sign-ins from now on. Its running jobs and its services
    continue; nothing else of it starts."""
    _disable(name, disabled=True)
    click.echo(
        f"{name} is disabled; its running jobs and its services continue, and nothing else of it "
        f"starts. `cavvy user enable {name}` undoes this"
    )


@command.command("enable")
@click.argument("name")
def enable(name: str) -> None:
    """Accept an account's tokens and sign-ins again."""
    _disable(name, disabled=False)
    click.echo(f"{name} is enabled")


def _disable(name: str, *, disabled: bool) -> None:
    from cavvy.client.account_wire import AccountClient

    with session() as client:
        AccountClient(client).disable_account(name, disabled=disabled)


@command.command("remove")
@click.argument("name")
def remove(name: str) -> None:
    """Remove an account with its tokens and roles. Its running jobs and its services continue;
    nothing else of it starts."""
    from cavvy.client.account_wire import AccountClient

    with session() as client:
        AccountClient(client).remove_account(name)
    click.echo(f"{name} is removed; its tokens are no longer valid")

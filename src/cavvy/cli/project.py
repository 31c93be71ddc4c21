"""`cavvy project`: manages the tree of projects."""

import click

from cavvy.cli.reach.session import session
from cavvy.cli.view.output import TableColumn, output_option, rows_out


@click.group("project")
def command() -> None:
    """Create and list projects.

    Projects form a tree: a role in a project applies in the projects below it, too.
    """


@command.command("create")
@click.argument("name")
@click.option("--parent", help="The project above; the default is none.")
def create(name: str, parent: str | None) -> None:
    """Create a project."""
    from cavvy.client.accounts import AccountClient

    with session() as client:
        AccountClient(client).create_project(name, parent)
    below = f" below {parent}" if parent else ""
    click.echo(f"project {name} is created{below}")


@command.command("list")
@output_option
def list_projects(output: str) -> None:
    """List the projects in which you have a role."""
    from cavvy.client.accounts import AccountClient

    columns = [
        TableColumn("name"),
        TableColumn("parent"),
        TableColumn("roles", "YOUR ROLES", show=_show_roles),
    ]
    with session() as client:
        rows = AccountClient(client).projects()
    rows_out(columns, rows, output, empty="no projects; `cavvy project create NAME` creates one")


def _show_roles(roles: object) -> str:
    return ", ".join(map(str, roles)) if isinstance(roles, list) else ""

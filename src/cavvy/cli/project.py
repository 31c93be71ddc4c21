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


@command.command("move")
@click.argument("name")
@click.option("--parent", help="The project above.")
@click.option("--top", is_flag=True, help="Move it to the top: no project is above it.")
@click.option(
    "--lift-policies",
    is_flag=True,
    help="Also if policies of its former place no longer apply to it.",
)
def move(name: str, parent: str | None, top: bool, lift_policies: bool) -> None:
    """Move a project below another one, with the projects below it.

    Its jobs, costs, budgets and own policies stay with it. Roles and policies of the projects above
    it change.
    """
    from cavvy.client.accounts import AccountClient

    if (parent is None) is not top:
        raise click.UsageError("give either --parent or --top")
    with session() as client:
        AccountClient(client).move_project(name, parent, lift_policies=lift_policies)
    click.echo(f"project {name} is now {f'below {parent}' if parent else 'at the top'}")


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

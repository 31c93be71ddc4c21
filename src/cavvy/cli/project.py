"""`cavvy project`: manages the tree of projects."""

import sys

import click
from msgspec import structs

from cavvy.cli.reach.session import session
from cavvy.cli.view import formatting
from cavvy.cli.view.groups import CommandGroup
from cavvy.cli.view.output import TableColumn, output_option, rows_out


@click.group("project", cls=CommandGroup)
def command() -> None:
    """Create and list projects.

    Projects form a tree: a role in a project applies in the projects below it, too.
    """


@command.command("create")
@click.argument("name")
@click.option("--parent", help="The parent project; the default is none.")
def create(name: str, parent: str | None) -> None:
    """Create a project."""
    from cavvy.client.account_wire import AccountClient

    with session() as client:
        AccountClient(client).create_project(name, parent)
    below = f" below {parent}" if parent else ""
    click.echo(f"project {name} is created{below}")


@command.command("move")
@click.argument("name")
@click.option("--parent", help="The project above.")
@click.option("--top", is_flag=True, help="Move the project to the top level.")
@click.option(
    "--lift-policies",
    is_flag=True,
    help="Move the project even if policies of its former parents no longer apply to it.",
)
@click.option(
    "--accept-budgets",
    is_flag=True,
    help="Do not ask for confirmation that additional budgets will count the project's spending.",
)
def move(
    name: str, parent: str | None, top: bool, lift_policies: bool, accept_budgets: bool
) -> None:
    """Move a project and its subprojects below another project.

    The moved project keeps its jobs, costs, budgets and own policies. The roles, policies and
    budgets of the new parents replace the roles, policies and budgets of the former parents.
    """
    from cavvy.client.account_wire import AccountClient, ProjectMove
    from cavvy.client.errors import ApiError

    if (parent is None) is not top:
        raise click.UsageError("give either --parent or --top")
    with session() as client:
        accounts = AccountClient(client)
        ask = ProjectMove(parent=parent, lift_policies=lift_policies, accept_budgets=accept_budgets)
        try:
            accounts.move_project(name, ask)
        except ApiError as error:
            if error.code != "project-budgets" or not sys.stdin.isatty():
                raise
            click.confirm(f"{error}. Move it?", abort=True, err=True)
            accounts.move_project(name, structs.replace(ask, accept_budgets=True))
    click.echo(f"project {name} is now {f'below {parent}' if parent else 'at the top level'}")


@command.command("archive")
@click.argument("name")
@click.option("--stop", is_flag=True, help="Stop the jobs and services that run in the project.")
def archive(name: str, stop: bool) -> None:
    """Archive a project and its subprojects, so that nothing new can start in them.

    Jobs, logs, costs, statements, budgets, policies and roles are kept. New projects cannot have
    the names of archived projects. `cavvy project unarchive` unarchives the projects.
    """
    from cavvy.client.account_wire import AccountClient

    with session() as client:
        AccountClient(client).archive_project(name, stop=stop)
    click.echo(f"project {name} is archived{'; its work is being stopped' if stop else ''}")


@command.command("unarchive")
@click.argument("name")
def unarchive(name: str) -> None:
    """Unarchive a project, with the subprojects that were archived at the same time."""
    from cavvy.client.account_wire import AccountClient

    with session() as client:
        AccountClient(client).unarchive_project(name)
    click.echo(f"project {name} is in use again")


@command.command("list")
@output_option
def list_projects(output: str) -> None:
    """List the projects in which you have a role."""
    from cavvy.client.account_wire import AccountClient

    columns = [
        TableColumn("name"),
        TableColumn("parent"),
        TableColumn("roles", "YOUR ROLES", show=_show_roles),
        TableColumn("archived_at", "ARCHIVED", show=formatting.show_ago),
    ]
    with session() as client:
        rows = AccountClient(client).projects()
    rows_out(columns, rows, output, empty="no projects; `cavvy project create NAME` creates one")


def _show_roles(roles: object) -> str:
    return ", ".join(map(str, roles)) if isinstance(roles, list) else ""

"""`cavvy role`: manages the roles of accounts in projects."""

import click

from cavvy.cli.reach.session import find_project_note, session
from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.groups import CommandGroup
from cavvy.cli.view.output import TableColumn, output_option, rows_out

_ROLES = ["viewer", "member", "operator", "admin", "billing", "auditor"]
_account = click.argument("account")
_role = click.argument("role", metavar="ROLE", type=click.Choice(_ROLES))
_project = click.option(
    "-p", "--project", help="The project; the role also applies to its subprojects."
)
_everywhere = click.option(
    "--all-projects", is_flag=True, help="Apply the role in all projects and on the server."
)


@click.group("role", cls=CommandGroup)
def command() -> None:
    """Grant, revoke and list roles of accounts in projects.

    A viewer sees jobs, logs and costs. A member is a viewer who may run jobs and connect to their
    nodes. An operator is a member who may set secrets and remove all work of a project. An admin is
    an operator who may create projects and grant roles. The role billing shows costs only, and the
    role auditor shows the audit log only.
    """


@command.command("grant")
@_account
@_role
@_project
@_everywhere
def grant(account: str, role: str, project: str | None, all_projects: bool) -> None:
    """Grant a role to an account."""
    from cavvy.client.account_wire import AccountClient

    where = _read_project(project, everywhere=all_projects)
    with session() as client:
        AccountClient(client).grant_role(account, role, where)
        undo = f"`cavvy role revoke {account} {role} -p {where}` revokes the role"
        note = find_project_note(client, where, undo)
    click.echo(f"{account} is {role} {_say(where)}")
    if note:
        click.echo(note, err=True)


@command.command("revoke")
@_account
@_role
@_project
@_everywhere
def revoke(account: str, role: str, project: str | None, all_projects: bool) -> None:
    """Revoke a role. Later requests that need the role are refused; running jobs continue."""
    from cavvy.client.account_wire import AccountClient

    where = _read_project(project, everywhere=all_projects)
    with session() as client:
        AccountClient(client).revoke_role(account, role, where)
    click.echo(f"{account} is no longer {role} {_say(where)}")


@command.command("list")
@_project
@_everywhere
@output_option
def list_roles(project: str | None, all_projects: bool, output: str) -> None:
    """List the roles granted in a project, without roles granted in its parent projects."""
    from cavvy.client.account_wire import AccountClient

    where = _read_project(project, everywhere=all_projects)
    with session() as client:
        rows = AccountClient(client).roles(where)
    columns = [
        TableColumn("account"),
        TableColumn("role"),
        TableColumn("project", drop=1),
        TableColumn("trust", "BY GROUPS OF", drop=2),
    ]
    rows_out(columns, rows, output, empty=f"no roles were granted {_say(where)}")


def _read_project(project: str | None, *, everywhere: bool) -> str | None:
    if (project is None) is not everywhere:
        raise CommandFailure(
            "give --project or --all-projects", "use -p PROJECT or --all-projects", exit_code=2
        )
    return project


def _say(project: str | None) -> str:
    return "in all projects" if project is None else f"in project {project}"

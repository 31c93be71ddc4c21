"""`cavvy server user`, `role` and `token`, and `cavvy project`: manage the accounts of people and
services, their roles in the tree of projects, and the tokens with which they sign in.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click
from msgspec import structs

from cavvy.cli.reach.arguments import read_seconds, scopes_option, show_scopes, within_option
from cavvy.cli.reach.session import find_project_note, session
from cavvy.cli.view import formatting
from cavvy.cli.view.failure import CommandFailure, note_out
from cavvy.cli.view.groups import CommandGroup
from cavvy.cli.view.output import TableColumn, output_option, rows_out

if TYPE_CHECKING:
    from cavvy.client.account_wire import AccountClient


@contextmanager
def _accounts() -> Iterator["AccountClient"]:
    """Yield the accounts of the server. An ApiError becomes a CommandFailure."""
    from cavvy.client.account_wire import AccountClient

    with session() as client:
        yield AccountClient(client)


@click.group("user", cls=CommandGroup)
def user_command() -> None:
    """Add, list and remove accounts of people and services.

    A new account has no roles. `cavvy server role grant` grants roles to an account, and `cavvy
    server token create --user NAME` creates the token with which an account signs in.
    """


@user_command.command("add")
@click.argument("name")
@click.option("--service", is_flag=True, help="The account of a program, such as a CI system.")
def add_user(name: str, service: bool) -> None:
    """Add an account."""
    with _accounts() as accounts:
        accounts.add_account(name, "service" if service else "user")
    click.echo(f"{name} is added; `cavvy server role grant {name} member -p PROJECT` grants a role")


@user_command.command("list")
@output_option
def list_users(output: str) -> None:
    """List the accounts."""
    from cavvy.cli.view import formatting

    columns = [
        TableColumn("name"),
        TableColumn("kind"),
        TableColumn("created_at", "ADDED", formatting.show_ago),
        TableColumn("disabled_at", "DISABLED", formatting.show_ago),
    ]
    with _accounts() as accounts:
        rows = accounts.accounts()
    rows_out(columns, rows, output, empty="no accounts; `cavvy server user add NAME` adds one")


@user_command.command("disable")
@click.argument("name")
def disable_user(name: str) -> None:
    """Refuse an account's tokens and sign-ins from now on. Its running jobs and its services
    continue; nothing else of it starts."""
    _disable(name, disabled=True)
    click.echo(
        f"{name} is disabled; its running jobs and its services continue, and nothing else of it "
        f"starts. `cavvy server user enable {name}` undoes this"
    )


@user_command.command("enable")
@click.argument("name")
def enable_user(name: str) -> None:
    """Accept an account's tokens and sign-ins again."""
    _disable(name, disabled=False)
    click.echo(f"{name} is enabled")


def _disable(name: str, *, disabled: bool) -> None:
    with _accounts() as accounts:
        accounts.disable_account(name, disabled=disabled)


@user_command.command("remove")
@click.argument("name")
def remove_user(name: str) -> None:
    """Remove an account with its tokens and roles. Its running jobs and its services continue;
    nothing else of it starts."""
    with _accounts() as accounts:
        accounts.remove_account(name)
    click.echo(f"{name} is removed; its tokens are no longer valid")


_ROLES = ["viewer", "member", "operator", "admin", "billing", "auditor"]
_account = click.argument("account")
_role = click.argument("role", metavar="ROLE", shell_complete=lambda *_: [*_ROLES])
_project = click.option(
    "-p", "--project", help="The project; the role also applies to its subprojects."
)
_everywhere = click.option(
    "--all-projects", is_flag=True, help="Apply the role in all projects and on the server."
)


@click.group("role", cls=CommandGroup)
def role_command() -> None:
    """Grant, revoke and list roles of accounts in projects.

    A viewer sees jobs, logs and costs. A member is a viewer who may run jobs and connect to their
    nodes. An operator is a member who may set secrets and remove all work of a project. An admin is
    an operator who may create projects and grant roles. The role billing shows costs only, and the
    role auditor shows the audit log only.
    """


@role_command.command("grant")
@_account
@_role
@_project
@_everywhere
def grant_role(account: str, role: str, project: str | None, all_projects: bool) -> None:
    """Grant a role to an account."""
    from cavvy.client.account_wire import AccountClient

    account, role = _read_role(account, role)
    where = _read_project(project, everywhere=all_projects)
    with session() as client:
        AccountClient(client).grant_role(account, role, where)
        undo = f"`cavvy server role revoke {account} {role} -p {where}` revokes the role"
        note = find_project_note(client, where, undo)
    click.echo(f"{account} is {role} {_say_where(where)}")
    if note:
        click.echo(note, err=True)


@role_command.command("revoke")
@_account
@_role
@_project
@_everywhere
def revoke_role(account: str, role: str, project: str | None, all_projects: bool) -> None:
    """Revoke a role. Later requests that need the role are refused; running jobs continue."""
    account, role = _read_role(account, role)
    where = _read_project(project, everywhere=all_projects)
    with _accounts() as accounts:
        accounts.revoke_role(account, role, where)
    click.echo(f"{account} is no longer {role} {_say_where(where)}")


def _read_role(account: str, role: str) -> tuple[str, str]:
    """Return the account and the role, which may be given in the other order. Raises
    BadParameter."""
    if account in _ROLES and role not in _ROLES:
        account, role = role, account
    if role not in _ROLES:
        raise click.BadParameter(
            f"{role!r} is not one of {', '.join(map(repr, _ROLES))}", param_hint="ROLE"
        )
    return account, role


@role_command.command("list")
@_project
@_everywhere
@output_option
def list_roles(project: str | None, all_projects: bool, output: str) -> None:
    """List the roles granted in a project, without roles granted in its parent projects."""
    where = _read_project(project, everywhere=all_projects)
    with _accounts() as accounts:
        rows = accounts.roles(where)
    columns = [
        TableColumn("account"),
        TableColumn("role"),
        TableColumn("project", drop=1),
        TableColumn("trust", "BY GROUPS OF", drop=2),
    ]
    rows_out(columns, rows, output, empty=f"no roles were granted {_say_where(where)}")


def _read_project(project: str | None, *, everywhere: bool) -> str | None:
    if (project is None) is not everywhere:
        raise CommandFailure(
            "give --project or --all-projects", "use -p PROJECT or --all-projects", exit_code=2
        )
    return project


def _say_where(project: str | None) -> str:
    return "in all projects" if project is None else f"in project {project}"


@click.group("project", cls=CommandGroup)
def project_command() -> None:
    """Create and list projects.

    Projects form a tree: a role in a project applies in the projects below it, too.
    """


@project_command.command("create")
@click.argument("name")
@click.option("--parent", help="The parent project; the default is none.")
def create_project(name: str, parent: str | None) -> None:
    """Create a project."""
    with _accounts() as accounts:
        accounts.create_project(name, parent)
    below = f" below {parent}" if parent else ""
    click.echo(f"project {name} is created{below}")


@project_command.command("move")
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
def move_project(
    name: str, parent: str | None, top: bool, lift_policies: bool, accept_budgets: bool
) -> None:
    """Move a project and its subprojects below another project.

    The moved project keeps its jobs, costs, budgets and own policies. The roles, policies and
    budgets of the new parents replace the roles, policies and budgets of the former parents.
    """
    from cavvy.client.account_wire import ProjectMove
    from cavvy.client.errors import ApiError

    if (parent is None) is not top:
        raise click.UsageError("give either --parent or --top")
    with _accounts() as accounts:
        ask = ProjectMove(parent=parent, lift_policies=lift_policies, accept_budgets=accept_budgets)
        try:
            accounts.move_project(name, ask)
        except ApiError as error:
            if error.code != "project-budgets" or not sys.stdin.isatty():
                raise
            click.confirm(f"{error}. Move it?", abort=True, err=True)
            accounts.move_project(name, structs.replace(ask, accept_budgets=True))
    click.echo(f"project {name} is now {f'below {parent}' if parent else 'at the top level'}")


@project_command.command("archive")
@click.argument("name")
@click.option("--stop", is_flag=True, help="Stop the jobs and services that run in the project.")
def archive_project(name: str, stop: bool) -> None:
    """Archive a project and its subprojects, so that nothing new can start in them.

    Jobs, logs, costs, statements, budgets, policies and roles are kept. New projects cannot have
    the names of archived projects. `cavvy project unarchive` unarchives the projects.
    """
    with _accounts() as accounts:
        accounts.archive_project(name, stop=stop)
    click.echo(f"project {name} is archived{'; its work is being stopped' if stop else ''}")


@project_command.command("unarchive")
@click.argument("name")
def unarchive_project(name: str) -> None:
    """Unarchive a project, with the subprojects that were archived at the same time."""
    with _accounts() as accounts:
        accounts.unarchive_project(name)
    click.echo(f"project {name} is in use again")


@project_command.command("use")
@click.argument("name")
def use_project(name: str) -> None:
    """Make later commands use this project on the server that they use now.

    --project names another for one command, and CAVVY_PROJECT for a shell. Without a choice,
    commands use the project `default`, or your only project if you have no role in `default`.
    """
    from cavvy.client.contexts import read_contexts, used_context, write_contexts
    from cavvy.client.state import default_home
    from cavvy.client.usual_project import USUAL_PROJECT

    with _accounts() as accounts:
        known = {each.name for each in accounts.projects()}
        if name not in known | {USUAL_PROJECT}:
            raise CommandFailure(
                f"you have no role in a project {name}",
                f"your projects are {', '.join(sorted(known)) or 'none'}",
            )
        contexts = read_contexts(default_home())
        server = used_context(contexts)
        write_contexts(default_home(), contexts.with_project(server, name))
    click.echo(f"commands on {server} use project {name} now")
    if (chosen := os.environ.get("CAVVY_PROJECT")) and chosen != name:
        note_out(f"CAVVY_PROJECT is set to {chosen}, overriding this choice")


@project_command.command("list")
@output_option
def list_projects(output: str) -> None:
    """List the projects in which you have a role."""
    columns = [
        TableColumn("name"),
        TableColumn("parent"),
        TableColumn("roles", "YOUR ROLES", show=_show_roles),
        TableColumn("archived_at", "ARCHIVED", show=formatting.show_ago),
    ]
    with _accounts() as accounts:
        rows = accounts.projects()
    rows_out(columns, rows, output, empty="no projects; `cavvy project create NAME` creates one")


def _show_roles(roles: object) -> str:
    return ", ".join(map(str, roles)) if isinstance(roles, list) else ""


@click.group("token", cls=CommandGroup)
def token_command() -> None:
    """Create, list and revoke access tokens.

    A token acts for an account. The scopes, the project and the expiry of a token limit what the
    token can do.
    """


@token_command.command("create")
@click.option("--user", help="The account of the token; the default is your own account.")
@click.option("--label", default="", help="A note that shows what the token is for.")
@scopes_option
@within_option
@click.option("--expires", default="90d", help="How long the token is valid, or `never`.")
def create_token(
    user: str | None, label: str, scopes: tuple[str, ...], project: str | None, expires: str
) -> None:
    """Create a token and print it. The token cannot be shown again."""
    from cavvy.client.account_wire import TokenAsk

    ask = TokenAsk(
        account=user,
        label=label,
        scopes=list(scopes),
        project=project,
        expires_s=None
        if expires == "never"
        else read_seconds(expires, "--expires", "30d, 12h or never"),
    )
    with _accounts() as accounts:
        made = accounts.create_token(ask)
    click.echo(
        f"token {made.view.id} of {made.view.account}; save it, because it cannot be shown again:",
        err=True,
    )
    click.echo(made.token)


@token_command.command("list")
@click.option("--user", help="Show only the tokens of this account.")
@output_option
def list_tokens(user: str | None, output: str) -> None:
    """List your tokens. An admin of the installation sees the tokens of all accounts."""
    from cavvy.cli.view import formatting

    columns = [
        TableColumn("id"),
        TableColumn("account"),
        TableColumn("label", wrap=True),
        TableColumn("scopes", show=show_scopes, drop=3),
        TableColumn("project", drop=4),
        TableColumn("last_used_at", "USED", formatting.show_ago, drop=2),
        TableColumn("expires_at", "EXPIRES", formatting.show_time, drop=1),
        TableColumn("revoked_at", "REVOKED", formatting.show_ago, drop=1),
    ]
    with _accounts() as accounts:
        rows = accounts.tokens(user)
    rows_out(columns, rows, output, empty="no tokens; `cavvy server token create` creates one")


@token_command.command("revoke")
@click.argument("token_id", metavar="ID")
def revoke_token(token_id: str) -> None:
    """Revoke a token immediately."""
    with _accounts() as accounts:
        accounts.revoke_token(token_id)
    click.echo(f"token {token_id} is revoked")

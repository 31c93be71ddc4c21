"""`cavvy server trust`: manages the issuers whose ID tokens the server accepts."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from cavvy.cli.reach.arguments import read_seconds, scopes_option, show_scopes, within_option
from cavvy.cli.reach.session import call_server, session
from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.groups import CommandGroup
from cavvy.cli.view.output import TableColumn, output_option, rows_out

if TYPE_CHECKING:
    from cavvy.client.account_wire import GroupRoleAsk


@click.group("trust", cls=CommandGroup)
def command() -> None:
    """Manage the identity providers whose sign-ins the server accepts: OpenID providers for people,
    and CI systems such as GitHub Actions for their jobs.

    Only admins of the server can use these commands.
    """


@command.command("add")
@click.argument("name")
@click.option("--issuer", required=True, help="The URL of the issuer, as in its ID tokens.")
@click.option(
    "--audience",
    help="The audience that ID tokens must have. The default is --client-id; for a CI system, "
    "give the URL of this server.",
)
@click.option(
    "--claim",
    "claims",
    multiple=True,
    metavar="NAME=VALUE",
    help="Accept only ID tokens with this claim; repeatable. In VALUE, `*` stands for any "
    "characters.",
)
@click.option("--account", default="", help="For a CI system: the service account of its jobs.")
@click.option(
    "--account-claim",
    default="",
    metavar="CLAIM",
    help="For people: the claim with the name of the account, for example email.",
)
@click.option(
    "--client-id",
    default="",
    help="The ID of the issuer's public client, with which people sign in from a terminal.",
)
@click.option(
    "--existing",
    is_flag=True,
    help="For people: accept only people whose account an admin has added. By default, the first "
    "sign-in creates the account.",
)
@click.option(
    "--group",
    "groups",
    multiple=True,
    metavar="GROUP=ROLE[:PROJECT]",
    help="The role that members of a group get when they sign in: in the project, or in all "
    "projects if none is stated. Repeatable.",
)
@click.option("--groups-claim", default="groups", help="The claim with the list of groups.")
@scopes_option
@within_option
@click.option(
    "--lifetime", default="1h", help="How long a sign-in is valid, from 1m to 30d.", metavar="TIME"
)
@click.option("--replace", is_flag=True, help="Replace an existing trust of this name.")
def add(
    name: str,
    issuer: str,
    audience: str | None,
    claims: tuple[str, ...],
    account: str,
    account_claim: str,
    client_id: str,
    existing: bool,
    groups: tuple[str, ...],
    groups_claim: str,
    scopes: tuple[str, ...],
    project: str | None,
    lifetime: str,
    replace: bool,
) -> None:
    """Accept an issuer's ID tokens."""
    from cavvy.client.account_wire import TrustAsk, add_trust

    ask = TrustAsk(
        name=name,
        issuer=issuer,
        audience=audience or client_id,
        claims=_read_claims(claims),
        account=account,
        account_claim=account_claim,
        accounts="existing" if existing else "create",
        groups_claim=groups_claim,
        groups=_read_groups(groups),
        scopes=list(scopes),
        project=project,
        lifetime_s=read_seconds(lifetime, "--lifetime", "1h, 12h or 7d"),
        client_id=client_id,
        replace=replace,
    )
    call_server(add_trust, ask)
    click.echo(f"the server now accepts ID tokens of {issuer}")


@command.command("list")
@output_option
def list_all(output: str) -> None:
    """List the issuers whose ID tokens the server accepts."""
    from cavvy.client.account_wire import list_trusts
    from cavvy.domain.values import asdict

    columns = [
        TableColumn("name"),
        TableColumn("issuer", wrap=True),
        TableColumn("account", show=lambda value: str(value or "by claim")),
        TableColumn("claims", show=_show_claims, wrap=True, drop=1),
        TableColumn("groups", show=_show_groups, wrap=True, drop=2),
        TableColumn("scopes", show=show_scopes, drop=3),
        TableColumn("project", drop=4),
        TableColumn("audience", wrap=True, drop=5),
    ]
    with session() as client:
        rows = list_trusts(client)
    empty = "the server accepts no ID tokens; `cavvy server trust add` adds an issuer"
    rows_out(columns, [asdict(each) for each in rows], output, empty=empty)


@command.command("remove")
@click.argument("name")
def remove(name: str) -> None:
    """Stop accepting an issuer's ID tokens. All sign-ins through this trust and all roles from it
    are revoked."""
    from cavvy.client.account_wire import remove_trust

    call_server(remove_trust, name)
    click.echo(f"the trust {name} is removed; sign-ins through it are no longer valid")


def _read_claims(texts: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for text in texts:
        name, value = _split(text, "--claim", "NAME=VALUE")
        if name in found:
            hint = "use `*` in the claim's value, or add a second trust"
            raise CommandFailure(f"--claim {name} was given twice", hint, 2)
        found[name] = value
    return found


def _split(text: str, option: str, form: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals or not value:
        raise _has_other_form(text, option, form)
    return name, value


def _has_other_form(text: str, option: str, form: str) -> CommandFailure:
    hint = "`cavvy server trust add --help` shows the options"
    return CommandFailure(f"{option} {text}: expected {form}", hint, 2)


def _read_groups(texts: Sequence[str]) -> "list[GroupRoleAsk]":
    from cavvy.client.account_wire import GroupRoleAsk

    found = []
    for text in texts:
        # The name of a group may contain "=", as those of LDAP do; roles and projects cannot.
        group, _, place = text.rpartition("=")
        role, _, project = place.partition(":")
        if not group or not role:
            raise _has_other_form(text, "--group", "GROUP=ROLE[:PROJECT], such as ml=member:vision")
        found.append(GroupRoleAsk(group=group, project=project, role=role))
    return found


def _show_claims(value: object) -> str:
    if not isinstance(value, dict):
        return ""
    return ", ".join(f"{name}={want}" for name, want in sorted(value.items()))


def _show_groups(value: object) -> str:
    found = value if isinstance(value, list) else []
    return ", ".join(
        f"{each['group']}={each['role']}{each['project'] and ':'}{each['project']}"
        for each in found
        if isinstance(each, dict)
    )

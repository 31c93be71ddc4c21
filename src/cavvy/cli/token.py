"""`cavvy token`: manages the tokens that accounts use to sign in."""

import click

from cavvy.cli.reach.arguments import read_seconds, scopes_option, show_scopes, within_option
from cavvy.cli.reach.session import session
from cavvy.cli.view.groups import CommandGroup
from cavvy.cli.view.output import TableColumn, output_option, rows_out


@click.group("token", cls=CommandGroup)
def command() -> None:
    """Create, list and revoke access tokens.

    A token acts for an account. The scopes, the project and the expiry of a token limit what the
    token can do.
    """


@command.command("create")
@click.option("--user", help="The account of the token; the default is your own account.")
@click.option("--label", default="", help="A note that shows what the token is for.")
@scopes_option
@within_option
@click.option("--expires", default="90d", help="How long the token is valid, or `never`.")
def create(
    user: str | None, label: str, scopes: tuple[str, ...], project: str | None, expires: str
) -> None:
    """Create a token and print it. The token cannot be shown again."""
    from cavvy.client.account_wire import AccountClient, TokenAsk

    ask = TokenAsk(
        account=user,
        label=label,
        scopes=list(scopes),
        project=project,
        expires_s=None
        if expires == "never"
        else read_seconds(expires, "--expires", "30d, 12h or never"),
    )
    with session() as client:
        made = AccountClient(client).create_token(ask)
    click.echo(
        f"token {made.view.id} of {made.view.account}; save it, because it cannot be shown again:",
        err=True,
    )
    click.echo(made.token)


@command.command("list")
@click.option("--user", help="Show only the tokens of this account.")
@output_option
def list_tokens(user: str | None, output: str) -> None:
    """List your tokens. An admin of the installation sees the tokens of all accounts."""
    from cavvy.cli.view import formatting
    from cavvy.client.account_wire import AccountClient

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
    with session() as client:
        rows = AccountClient(client).tokens(user)
    rows_out(columns, rows, output, empty="no tokens; `cavvy token create` creates one")


@command.command("revoke")
@click.argument("token_id", metavar="ID")
def revoke(token_id: str) -> None:
    """Revoke a token immediately."""
    from cavvy.client.account_wire import AccountClient

    with session() as client:
        AccountClient(client).revoke_token(token_id)
    click.echo(f"token {token_id} is revoked")

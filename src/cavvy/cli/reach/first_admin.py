"""Creates the first admin of a server that a team shares, and the admin's first token."""

from typing import TYPE_CHECKING

import click

from cavvy.cli.reach.session import failures, make_patience
from cavvy.cli.view.failure import CommandFailure
from cavvy.client.account_wire import AccountClient, TokenAsk
from cavvy.client.addresses import check_address, name_host
from cavvy.client.errors import ApiError
from cavvy.client.state import host_name

if TYPE_CHECKING:
    from cavvy.client import ApiClient

_LABEL = "first sign-in"
_VALID_S = 90 * 24 * 3600


def show_first_admin(admin: str | None, url: str | None) -> None:
    """Start the server if it is not running, create the first admin, and print the admin's
    sign-in command. Without `admin`, ask for a name. Raises CommandFailure.
    """
    from getpass import getuser

    from cavvy.client import embedded

    with failures():
        server = embedded.ensure_server(patience=make_patience())
        url = url.rstrip("/") if url else find_url(server.listen, host_name())
        check_address(url)
        admin = admin or click.prompt("Name of the admin", default=getuser(), err=True)
        with embedded.connect(patience=make_patience()) as client:
            token = create_first_admin(client, admin)
    click.echo(f"{admin} has all rights on this server. To sign in from any machine:", err=True)
    click.echo(f"cavvy login {url} --token {token}")
    click.echo("save this line; its token cannot be shown again", err=True)


def create_first_admin(client: "ApiClient", name: str) -> str:
    """Create an account with all rights, and return a token for it. If the account exists, for
    example after an interrupted attempt, it becomes the admin. Raises CommandFailure if an admin
    already exists, and ApiError if the server refuses a request.
    """
    accounts = AccountClient(client)
    admins = sorted(each.account for each in accounts.roles(None) if each.role == "admin")
    if admins:
        raise CommandFailure(
            f"this server already has an admin: {', '.join(admins)}",
            f"`cavvy token create --user {admins[0]}` creates another token",
        )
    try:
        accounts.add_account(name, "user")
    except ApiError as error:
        if error.code != "name-taken":
            raise
    # The token is created before the role, so that the command can be repeated after an
    # interruption.
    made = accounts.create_token(TokenAsk(account=name, label=_LABEL, expires_s=_VALID_S))
    accounts.grant_role(name, "admin", None)
    return made.token


def find_url(listen: str | None, host: str) -> str:
    """Return the URL at which users reach a server that listens on the address `listen` of the
    machine `host`. Raises CommandFailure if the server listens only on its Unix socket.
    """
    if listen is None:
        raise CommandFailure(
            "the server can be reached only by the user who runs it, on this machine",
            "restart the server with an address: cavvy server start --listen 0.0.0.0:443 "
            "--tls-cert FILE --tls-key FILE; if users connect through a proxy, give the proxy's "
            "URL with --url",
        )
    return name_host(listen, host)

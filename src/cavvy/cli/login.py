"""`cavvy login`, `logout` and `context`: the servers that this user signed in to. Later
commands are sent to the chosen one, which is the newest at first.
"""

import os
from typing import TYPE_CHECKING

import click

from cavvy.cli.reach.session import failures
from cavvy.cli.view.failure import CommandFailure, note_out
from cavvy.cli.view.groups import CommandGroup
from cavvy.cli.view.output import TableColumn, output_option, rows_out
from cavvy.named_files import read_named

if TYPE_CHECKING:
    from datetime import datetime

    from cavvy.client.account_wire import SignInWay, WhoAmIView
    from cavvy.client.client import ApiClient
    from cavvy.client.contexts import Context


_TIMEOUT_S = 15.0


@click.command("login")
@click.argument("address", metavar="URL")
@click.option(
    "--token",
    help="The token; the default is CAVVY_TOKEN. Other users of this machine may see the arguments "
    "of commands.",
)
@click.option(
    "--token-file", metavar="FILE", help="A file that contains the token; - is standard input."
)
@click.option(
    "--trust",
    metavar="NAME",
    help="The identity provider to sign in with, if the server accepts several: its name in "
    "`cavvy server trust list`.",
)
@click.option(
    "--ca-file",
    metavar="FILE",
    help="Trust only the authorities of this file, in PEM, for the server's certificate.",
)
@click.option("--name", help="A name for the server; the default is its host name.")
def command(
    address: str,
    token: str | None,
    token_file: str | None,
    trust: str | None,
    ca_file: str | None,
    name: str | None,
) -> None:
    """Sign in to a server, such as https://cavvy.example.org. Later commands use this server, until
    `cavvy context use` chooses another server.

    Without a token, a CI job signs in with its own ID token. A person signs in with a browser on
    any machine, if the server offers browser sign-in. If the server does not offer browser sign-in,
    the command asks for a token, which an admin creates with `cavvy server token create --user
    NAME`. The token is stored in the state folder, in a file that only you can read.
    """
    from cavvy.client.addresses import check_address
    from cavvy.client.contexts import LOCAL, Context, read_contexts, write_contexts
    from cavvy.client.state import default_home

    address = address.rstrip("/")
    with failures():
        check_address(address)
    name = name or _name_of(address)
    if name == LOCAL:
        raise CommandFailure(
            f"{LOCAL!r} is the name of this machine's own server", "choose another --name", 2
        )
    if trust is not None and (token is not None or token_file is not None):
        raise CommandFailure("--trust and a token were both given", "give one of them", 2)
    given = _given_token(token, token_file) if trust is None else None
    context = Context(name=name, address=address, token=given or "", ca=_read_ca(ca_file))
    with failures():
        if given is None:
            context = _sign_in(context, trust)
        me = _check(context)
        write_contexts(default_home(), read_contexts(default_home()).with_context(context))
    until = f" until {_show_time(me.expires_at)}" if given is None and me.expires_at else ""
    click.echo(f"signed in to {address} as {me.account or 'the owner of the server'}{until}")
    if me.account and not me.roles:
        click.echo(f"{me.account} has no role yet; an admin grants it by `cavvy server role grant`")
    click.echo(
        f"commands now use this server; `cavvy context use {LOCAL}` returns to the server of "
        "this machine"
    )


def _sign_in(context: "Context", trust: str | None) -> "Context":
    """Return the context with a token. The token belongs to this CI job, is the result of a browser
    sign-in, or is entered by the person. Raises ApiError.
    """
    import os

    from msgspec.structs import replace

    from cavvy.client.account_wire import sign_in
    from cavvy.client.connection import open_context
    from cavvy.client.device_flow import find_ci_token, sign_in_by_device

    with open_context(context, timeout_s=_TIMEOUT_S) as client:
        client.send(
            "GET", "/v1/health"
        )  # no repetition, so that a wrong address is reported at once
        id_token = None if trust else find_ci_token(os.environ, context.address)
        if id_token is None:
            way = _choose_way(client, trust)
            if way is None:
                return replace(context, token=_ask_token())
            id_token = sign_in_by_device(way.issuer, way.client_id, _show_code)
        return replace(context, token=sign_in(client, id_token).token)


def _choose_way(client: "ApiClient", trust: str | None) -> "SignInWay | None":
    """Return the sign-in method for people, or None if the server offers none."""
    from cavvy.client.account_wire import list_ways
    from cavvy.client.errors import ApiError

    try:
        ways = list_ways(client)
    except ApiError as error:
        if error.status not in (401, 404):  # as older servers do
            raise
        ways = []
    names = ", ".join(each.name for each in ways) or "none"
    chosen = [each for each in ways if trust in (None, each.name)]
    if trust and not chosen:
        raise CommandFailure(
            f"the server does not offer {trust!r}", f"the server offers {names}", 2
        )
    if len(chosen) > 1:
        raise CommandFailure(
            "the server offers several sign-ins", f"choose one with --trust: {names}", 2
        )
    return chosen[0] if chosen else None


def _show_code(url: str, code: str) -> None:
    click.echo(f"open {url} in any browser, and check or enter the code {code}", err=True)
    click.echo("waiting until you have signed in ...", err=True)


def _check(context: "Context") -> "WhoAmIView":
    """Ask the server which account the token belongs to. Raises ApiError."""
    from cavvy.client import API, IncompatibleVersions
    from cavvy.client.account_wire import AccountClient
    from cavvy.client.connection import open_context

    with open_context(context, timeout_s=_TIMEOUT_S) as client:
        client.send(
            "GET", "/v1/health"
        )  # no repetition, so that a wrong address is reported at once
        server = client.server()
        if server.api != API:
            raise IncompatibleVersions(
                "client-too-old" if server.api > API else "server-too-old",
                f"the server has version {server.api} of the API (cavvy {server.version}), and "
                f"this command has version {API}",
                "install the server's version of cavvy",
            )
        return AccountClient(client).whoami()


def _name_of(address: str) -> str:
    from urllib.parse import urlsplit

    return urlsplit(address).hostname or "server"


def _show_time(at: "datetime") -> str:
    from cavvy.cli.view.formatting import show_time

    return show_time(at)


def _given_token(token: str | None, file: str | None) -> str | None:
    """Return the token that an option or the environment contains."""
    import os
    import sys

    if token is not None and file is not None:
        raise CommandFailure("--token and --token-file were both given", "give one of them", 2)
    if file is not None:
        token = sys.stdin.read() if file == "-" else _read(file, "--token-file")
    elif token is None:
        token = os.environ.get("CAVVY_TOKEN") or None
    return None if token is None else _check_token(token)


def _ask_token() -> str:
    return _check_token(click.prompt("Token", hide_input=True, err=True))


def _check_token(text: str) -> str:
    token = text.strip()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise CommandFailure(
            "this is not a token",
            "a token is one word, as `cavvy server token create` prints it",
            2,
        )
    return token


def _read_ca(file: str | None) -> str:
    import ssl

    if file is None:
        return ""
    text = _read(file, "--ca-file")
    try:
        ssl.create_default_context(cadata=text)
    except (ssl.SSLError, ValueError) as error:
        raise CommandFailure(
            f"--ca-file: {file} contains no certificates in PEM",
            "the file must contain lines such as -----BEGIN CERTIFICATE-----",
            2,
        ) from error
    return text


def _read(path: str, option: str) -> str:
    try:
        return read_named(path, 1 << 20).decode("ascii")
    except UnicodeDecodeError as error:
        raise CommandFailure(f"{option}: {path} is not ASCII text", exit_code=2) from error
    except OSError as error:
        raise CommandFailure(f"{option}: {path}: {error.strerror}", exit_code=2) from error


@click.command("logout")
@click.argument("name", required=False)
def logout_command(name: str | None) -> None:
    """Forget a server and its token; the default is the server that commands use. The token stays
    valid until `cavvy server token revoke` revokes it.
    """
    from cavvy.client.contexts import LOCAL, read_contexts, write_contexts
    from cavvy.client.state import default_home

    with failures():
        contexts = read_contexts(default_home())
        name = name or contexts.current
        if name == LOCAL:
            click.echo("commands use this machine's own server, so there is no server to forget")
            return
        contexts.switched(name)  # reports an unknown name
        write_contexts(default_home(), contexts.without(name))
    click.echo(f"{name} is forgotten; `cavvy server token revoke` makes the server's token invalid")


@click.group("context", cls=CommandGroup)
def context_command() -> None:
    """List the servers that you signed in to, and choose the server that commands use.

    `cavvy login` adds a server. `local` is this machine's own server. `cavvy --context NAME` and
    CAVVY_CONTEXT choose a server for one command or one shell.
    """


@context_command.command("list")
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


@context_command.command("use")
@click.argument("name")
def use_context(name: str) -> None:
    """Make later commands use this server; `local` is the server of this machine."""
    from cavvy.client.contexts import read_contexts, write_contexts
    from cavvy.client.state import default_home

    with failures():
        write_contexts(default_home(), read_contexts(default_home()).switched(name))
    click.echo(f"commands use {name} now")
    chosen = os.environ.get("CAVVY_CONTEXT")
    if chosen and chosen != name:
        note_out(f"CAVVY_CONTEXT is set to {chosen}, overriding this choice")

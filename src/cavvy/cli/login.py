"""`cavvy login`: signs in to a server, and makes it the one that commands use."""

from typing import TYPE_CHECKING

import click

from cavvy.cli.reach.session import failures
from cavvy.cli.view.failure import CommandFailure

if TYPE_CHECKING:
    from cavvy.client.account_wire import WhoAmIView
    from cavvy.client.contexts import Context

_TIMEOUT_S = 15.0


@click.command("login")
@click.argument("address", metavar="URL")
@click.option(
    "--token",
    help="The token; the default is CAVVY_TOKEN, or a prompt. Other users of this machine may see "
    "the arguments of commands.",
)
@click.option("--token-file", metavar="FILE", help="A file with the token; - is standard input.")
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
    ca_file: str | None,
    name: str | None,
) -> None:
    """Sign in to a server, such as https://cavvy.example.org. Later commands use this server, until
    `cavvy context use` chooses another one.

    An admin creates the token with `cavvy token create --user NAME`. It is checked, and then stored
    in the state folder, in a file that only you can read.
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
    context = Context(
        name=name, address=address, token=_read_token(token, token_file), ca=_read_ca(ca_file)
    )
    with failures():
        me = _check(context)
        write_contexts(default_home(), read_contexts(default_home()).with_context(context))
    click.echo(f"signed in to {address} as {me.account or 'the owner of the server'}")
    click.echo(
        f"commands use this server now; `cavvy context use {LOCAL}` goes back to this machine's"
    )


def _check(context: "Context") -> "WhoAmIView":
    """Ask the server which account the token belongs to. Raises ApiError."""
    from cavvy.client import API, IncompatibleVersions
    from cavvy.client.accounts import AccountClient
    from cavvy.client.connection import open_context

    with open_context(context, timeout_s=_TIMEOUT_S) as client:
        client.send("GET", "/v1/health")  # once: a wrong address is reported at once
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


def _read_token(token: str | None, file: str | None) -> str:
    import os
    import sys

    if token is not None and file is not None:
        raise CommandFailure("--token and --token-file were both given", "give one of them", 2)
    if file is not None:
        token = sys.stdin.read() if file == "-" else _read(file, "--token-file")
    elif token is None:
        token = os.environ.get("CAVVY_TOKEN") or click.prompt("Token", hide_input=True, err=True)
    token = (token or "").strip()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise CommandFailure(
            "this is not a token", "a token is one word, as `cavvy token create` prints it", 2
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
            "it must contain lines such as -----BEGIN CERTIFICATE-----",
            2,
        ) from error
    return text


def _read(path: str, option: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.read(1 << 20)
    except UnicodeDecodeError as error:
        raise CommandFailure(f"{option}: {path} is not a text in ASCII", exit_code=2) from error
    except OSError as error:
        raise CommandFailure(f"{option}: {path}: {error.strerror}", exit_code=2) from error

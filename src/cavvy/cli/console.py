"""`cavvy console`: shows the web console."""

import os
import sys
from typing import TYPE_CHECKING

import click

from cavvy.cli.reach.session import session
from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.numbers import WholeRange

if TYPE_CHECKING:
    import socket

    from cavvy.client import ApiClient

_PATIENCE_S = 5.0  # seconds for which a page waits for a server that does not answer
_HOST = "127.0.0.1"
_USUAL_PORT = 8520
_TRIES = 20  # ports that are tried if the usual one is in use


@click.command("console")
@click.option(
    "--port",
    type=WholeRange(0, 65535),
    help=f"The port; the default is {_USUAL_PORT} or, if it is in use, the next free port.",
)
@click.option("--no-browser", is_flag=True, help="Do not open a browser.")
@click.option(
    "--listen",
    metavar="ADDRESS:PORT",
    help="Serve the console for several users, who sign in with their own tokens. Without "
    "--tls-cert, ADDRESS must be a loopback address, for example behind a proxy.",
)
@click.option(
    "--tls-cert",
    type=click.Path(exists=True, dir_okay=False),
    help="The file with the certificate for --listen, in PEM, followed by its authorities.",
)
@click.option(
    "--tls-key",
    type=click.Path(exists=True, dir_okay=False),
    help="The file with the key of --tls-cert, in PEM and without a password.",
)
def command(
    port: int | None,
    no_browser: bool,
    listen: str | None,
    tls_cert: str | None,
    tls_key: str | None,
) -> None:
    """Show jobs, services, machines and costs in a browser, until Ctrl-C.

    The pages show the server that commands use, with your permissions. Only this machine can reach
    them. To use a browser of another machine, forward the port: ssh -L PORT:127.0.0.1:PORT HOST.

    With --listen, the console needs no account of its own: each user sees what the user's token
    permits.
    """
    if (tls_cert is None) != (tls_key is None):
        raise click.UsageError("--tls-cert and --tls-key are used together")
    if listen is None:
        if tls_cert is not None:
            raise click.UsageError("--tls-cert is used with --listen")
        _serve_one_user(port, no_browser)
        return
    if port is not None:
        raise click.UsageError("--listen contains the port, so --port cannot be used with it")
    _serve_each_user(listen, (tls_cert, tls_key) if tls_cert and tls_key else None)


def _serve_one_user(port: int | None, no_browser: bool) -> None:
    from cavvy.console.access import OneUser
    from cavvy.console.serving import serve

    listener = _open_port(port)
    with session(patience_s=_PATIENCE_S) as client:
        name = _name_of(client)
        access = OneUser(client)
        address = f"http://{_HOST}:{listener.getsockname()[1]}/sign-in?key={access.secret}"
        click.echo(f"The console of {name}, until Ctrl-C:\n{address}")
        if not no_browser and _has_browser():
            import webbrowser

            webbrowser.open(address)
        serve(access, name, listener)


def _serve_each_user(listen: str, tls: tuple[str, str] | None) -> None:
    from cavvy.client import ApiClient, Patience
    from cavvy.console.access import EachUser
    from cavvy.console.serving import serve

    listener = _open_address(listen, is_safe=tls is not None)
    with session(patience_s=_PATIENCE_S) as client:
        name, server, ca = _name_of(client), client.address, client.ca

    def connect(token: str) -> ApiClient:
        return ApiClient(server, token, patience=Patience(_PATIENCE_S), ca=ca)

    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    click.echo(f"The console of {name}: {'https' if tls else 'http'}://{shown}:{port}/")
    serve(EachUser(connect), name, listener, tls)


def _name_of(client: "ApiClient") -> str:
    """Return how people call the server: its address or, for an embedded server, its machine."""
    address = client.address
    return client.server().host if address.startswith("unix:") else address.partition("://")[2]


def _open_port(port: int | None) -> "socket.socket":
    """Listen on a port of this machine. Raises CommandFailure."""
    tried = [port] if port is not None else [*range(_USUAL_PORT, _USUAL_PORT + _TRIES), 0]
    for each in tried:
        try:
            return _listen(_HOST, each)
        except OSError as error:
            problem = error
    raise CommandFailure(
        f"cannot listen on {_HOST}:{tried[-1]}: {problem.strerror}", "choose another --port"
    )


def _open_address(listen: str, *, is_safe: bool) -> "socket.socket":
    """Raises UsageError, CommandFailure."""
    import ipaddress

    host, _, digits = listen.rpartition(":")
    try:
        address = ipaddress.ip_address(host.strip("[]"))
        port = int(digits)
        if not 0 <= port <= 65535:
            raise ValueError
    except ValueError:
        raise click.UsageError(
            f"--listen expects an address and a port, such as 0.0.0.0:8520, not {listen!r}"
        ) from None
    if not (is_safe or address.is_loopback):
        raise click.UsageError(
            f"other machines can reach {listen}, so the tokens of users need TLS: use --tls-cert "
            "and --tls-key, or a loopback address behind a proxy that ends TLS"
        )
    try:
        return _listen(str(address), port)
    except OSError as error:
        raise CommandFailure(
            f"cannot listen on {listen}: {error.strerror}", "choose another address or port"
        ) from error


def _listen(host: str, port: int) -> "socket.socket":
    import socket

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family)


def _has_browser() -> bool:
    """Return whether a browser would open on the user's screen."""
    return sys.stdout.isatty() and (
        sys.platform == "darwin"
        or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    )

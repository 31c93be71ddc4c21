"""`cavvy console`: shows the web console."""

import os
import sys
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import click

from cavvy.cli.reach.session import session
from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.numbers import count_option

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator

    from starlette.types import ASGIApp

    from cavvy.client import ApiClient
    from cavvy.server.doors import BoundedServer
    from cavvy.server.user_listener import UserTls

_PATIENCE_S = 5.0  # seconds for which a page waits for a server that does not answer
_HOST = "127.0.0.1"
# The console's name in browsers. The addresses of services and of forwarded ports contain
# 127.0.0.1, and browsers send a cookie to all ports of a host name.
_NAME = "localhost"
_USUAL_PORT = 8520
_TRIES = 20  # ports that are tried if the usual one is in use


@click.command("console")
@count_option(
    "--port",
    least=0,
    most=65535,
    help=f"The port; the default is {_USUAL_PORT} or, if it is in use, the next free port.",
)
@click.option("--no-browser", is_flag=True, help="Do not open a browser.")
@click.option(
    "--listen",
    metavar="ADDRESS:PORT",
    help="Serve the console for several users, who sign in with their own tokens. Without "
    "--tls-cert, ADDRESS must be a loopback address, such as 127.0.0.1 behind a proxy.",
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

    The pages show the server that commands use, with your permissions. The printed address contains
    a secret, with which others could act as you. Only browsers of this machine can reach the pages.
    To use a browser on another machine, run `ssh -L 8520:127.0.0.1:8520 HOST` there, where HOST is
    this machine, and open the printed address.

    With --listen, several users share the console, and each sees what their own token permits.
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

    with (
        _open_port(port) as listener,
        _hold_name(listener.getsockname()[1]) as browser_name,
        session(patience_s=_PATIENCE_S) as client,
    ):
        name, start = _name_of(client), _follow_embedded(client)
        access = OneUser(client)
        chosen = listener.getsockname()[1]
        address = f"http://{browser_name}:{chosen}/sign-in?key={access.secret}"
        click.echo(f"The console of {name}, until Ctrl-C:\n{address}")
        if not _has_screen() and os.environ.get("SSH_CONNECTION"):
            click.echo(
                "To open this address on the machine that you sit at, run there first:\n"
                f"{_forwarding(chosen)}"
            )
        if not no_browser and _has_screen() and sys.stdout.isatty():
            import webbrowser

            webbrowser.open(address)
        serve(access, name, listener, _http_server_maker(None), start)


def _serve_each_user(listen: str, tls: tuple[str, str] | None) -> None:
    from cavvy.client import ApiClient, Patience
    from cavvy.console.access import EachUser
    from cavvy.console.serving import serve

    context = _read_tls(tls) if tls else None
    with _open_address(listen, is_safe=tls is not None) as listener:
        with session(patience_s=_PATIENCE_S) as client:
            name, start = _name_of(client), _follow_embedded(client)
            server, ca, find = client.address, client.ca, client.revive

        def connect(token: str) -> ApiClient:
            revive = None if find is None else lambda: (find()[0], token)
            return ApiClient(server, token, patience=Patience(_PATIENCE_S), ca=ca, revive=revive)

        shown = _shown_address(listener, is_secure=tls is not None)
        click.echo(f"The console of {name} for several users, until Ctrl-C:\n{shown}")
        serve(EachUser(connect), name, listener, _http_server_maker(context), start)


def _http_server_maker(tls: "UserTls | None") -> "Callable[[ASGIApp], BoundedServer]":
    """Return a function that makes the HTTP server, which has the limits of Cavvy's own server."""
    from cavvy.server.doors import BoundedServer

    return lambda app: BoundedServer(app, tls)


def _follow_embedded(client: "ApiClient") -> "Callable[[], None] | None":
    """If this is a client of the embedded server, make it follow the server when the server
    restarts, and return a function that starts the server. Otherwise, return None.
    """
    from threading import Lock

    from cavvy.client import Patience
    from cavvy.client.connection import ensure_server
    from cavvy.client.state import default_home
    from cavvy.console.memory import find_embedded

    if client.revive is None:
        return None
    home, lock = default_home(), Lock()
    client.revive = find_embedded(home)

    def start() -> None:
        with lock:
            ensure_server(home=home, patience=Patience())

    return start


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
    raise _cannot_listen(f"{_HOST}:{tried[-1]}", problem, "--port") from problem


@contextmanager
def _hold_name(port: int) -> "Iterator[str]":
    """Yield the name under which browsers open the console. Browsers also try the address ::1 for
    this name, so its port is held meanwhile: a program of another user that listened there would
    get the secret in the console's address.
    """
    import errno
    import socket

    name = _NAME
    with ExitStack() as stack:
        try:
            held = stack.enter_context(socket.socket(socket.AF_INET6))
            held.bind(("::1", port))  # without listening, so that browsers go on to 127.0.0.1
        except OSError as error:  # others mean that this machine has no such address
            if error.errno == errno.EADDRINUSE:
                name = _HOST
        yield name


def _open_address(listen: str, *, is_safe: bool) -> "socket.socket":
    """Raises UsageError, CommandFailure."""
    import ipaddress

    from cavvy.domain.units import is_whole

    host, _, digits = listen.rpartition(":")
    try:
        address = ipaddress.ip_address(host.strip("[]"))
        if not (is_whole(digits) and int(digits) <= 65535):
            raise ValueError
    except ValueError:
        raise click.UsageError(
            "--listen expects an address and a port, such as 0.0.0.0:8520 or [::1]:8520, "
            f"not {listen!r}"
        ) from None
    if not (is_safe or address.is_loopback):
        raise click.UsageError(
            f"other machines can reach {listen}, so the tokens of users need TLS: use --tls-cert "
            "and --tls-key, or a loopback address behind a proxy that ends TLS"
        )
    try:
        return _listen(str(address), int(digits))
    except OSError as error:
        raise _cannot_listen(listen, error, "--listen") from error


def _listen(host: str, port: int) -> "socket.socket":
    import socket

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=1024)


def _cannot_listen(where: str, error: OSError, option: str) -> CommandFailure:
    import errno

    reason = (error.strerror or str(error)).split(" (", 1)[0]
    hints = {
        errno.EADDRINUSE: f"another program uses this port; choose another one with {option}",
        errno.EACCES: f"only root may use ports below 1024; choose another one with {option}",
        errno.EADDRNOTAVAIL: f"this machine does not have this address; change {option}",
    }
    hint = hints.get(error.errno or 0, f"choose another port with {option}")
    return CommandFailure(f"cannot listen on {where}: {reason}", hint)


def _read_tls(files: tuple[str, str]) -> "UserTls":
    """Raises CommandFailure."""
    from cavvy.server.state_dir import StateDirError
    from cavvy.server.user_listener import UserTls

    try:
        return UserTls(*files, settings=("--tls-cert", "--tls-key"))
    except StateDirError as error:
        raise CommandFailure(error.message, error.hint) from error


def _shown_address(listener: "socket.socket", *, is_secure: bool) -> str:
    """Return the address for a browser. A machine that listens on all of its addresses is called by
    its name.
    """
    import ipaddress
    import socket

    host, port = listener.getsockname()[:2]
    if ipaddress.ip_address(host).is_unspecified:
        host = socket.gethostname()
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if is_secure else 'http'}://{shown}:{port}/"


def _forwarding(port: int) -> str:
    """Return the command that forwards the port to the machine from which the user came by SSH."""
    import getpass
    import socket

    fields = os.environ.get("SSH_CONNECTION", "").split()
    other_port = f"-p {fields[3]} " if len(fields) == 4 and fields[3] != "22" else ""
    host = f"{getpass.getuser()}@{socket.gethostname()}"
    return f"ssh -N -L {port}:{_HOST}:{port} {other_port}{host}"


def _has_screen() -> bool:
    """Return whether a browser would open on the user's screen."""
    return sys.platform == "darwin" or bool(
        os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    )

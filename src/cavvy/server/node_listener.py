"""The listeners for nodes. The listener for nodes outside this machine serves the routes for agents
and files by hash, but no routes for users.

If several servers share one database, agents on this machine connect to a socket that one server on
the machine serves. When that server ends, another server on the machine takes over the socket, so
agents need no new address.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Collection, Coroutine
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Receive, Scope, Send

from cavvy.api.app_state import NodeDownloads
from cavvy.api.auth import AGENT, BOOT, HEALTH, NODES, list_own_roots
from cavvy.api.errors import ApiProblem
from cavvy.api.peers import is_passed_on
from cavvy.api.tokens import GangTokens
from cavvy.api.wire import reply
from cavvy.client.wire import ErrorBody
from cavvy.providers.base import NodeEndpoint
from cavvy.providers.hosts.bundles import pack_python, platform
from cavvy.server.addresses import explain_reason
from cavvy.server.doors import WAIT_S, open_port
from cavvy.server.node_tls import Certificate, load_certificate
from cavvy.server.state_dir import StateDir, StateDirError, listen_at
from cavvy.settings import Settings

if TYPE_CHECKING:
    from cavvy.server.doors import BoundedServer

_OPEN = (AGENT, BOOT, NODES)
# the key in the ASGI scope that marks connections that may only download files by hash
ONLY_DOWNLOADS = "cavvy.only_downloads"


class NodeListener:
    """A certificate, and a TCP socket that is bound but does not accept connections yet."""

    def __init__(
        self, sock: socket.socket, address: str, certificate: Certificate, own_address: str
    ) -> None:
        self.sock = sock
        self.address = address  # the address that nodes use
        # the address of this server itself, if `address` belongs to a load balancer of several
        # servers
        self.own_address = own_address
        self.certificate = certificate

    def describe(
        self,
        downloads: NodeDownloads,
        tokens: GangTokens,
        archive: Callable[[], bytes],
        cached: Path,
    ) -> NodeEndpoint:
        """Return the facts about this listener that providers need. The agent and the Python
        runtime are packed when they are first used.
        """

        def pythons() -> dict[str, str]:
            cached.mkdir(mode=0o700, parents=True, exist_ok=True)
            return {platform(): downloads.put(pack_python(cached).content)}

        return NodeEndpoint(
            address=self.address,
            pin=self.certificate.pin,
            key_pin=self.certificate.key_pin,
            agent=cache(lambda: downloads.put(archive())),
            pythons=cache(pythons),
            publish=downloads.put,
            claim_token=tokens.of_claim,
        )


def listen_for_nodes(
    home: StateDir, settings: Settings, *, shared: bool = False
) -> NodeListener | None:
    """Bind to `server.tls_listen`, or return None if that setting is empty. If several servers
    share the work (`shared`), servers on one machine may listen on the same port, and the kernel
    chooses a server for each connection. Raises StateDirError.
    """
    if not settings.text("server.tls_listen"):
        return None
    host, port = read_listen(settings)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # fails for the same names as the next line, but before a socket is open
        host.encode("idna")
        sock = open_port(host, port, family, wait_s=WAIT_S, reuse_port=shared)
    except (OSError, ValueError) as error:  # ValueError if `host` is not a host name
        raise StateDirError(
            "settings-invalid",
            f"cannot listen on {host}:{port}: {explain_reason(error)}",
            "choose another address or port for server.tls_listen",
        ) from error
    try:
        port = sock.getsockname()[1]
        address = told_address(settings, host, port)
        certificate = load_certificate(home.file("tls.pem"))
    except (ValueError, OSError) as error:
        sock.close()
        raise StateDirError(
            "settings-invalid",
            f"{home.file('tls.pem')} cannot be used: {error}",
            "if the file is damaged, delete the file; the deletion disconnects running agents",
        ) from error
    except StateDirError:
        sock.close()
        raise
    sock.setblocking(False)
    return NodeListener(sock, address, certificate, f"https://{_reachable(host)}:{port}")


def read_listen(settings: Settings) -> tuple[str, int]:
    """Return the host and port of `server.tls_listen`. Raises StateDirError."""
    where = settings.text("server.tls_listen")
    host, colon, port = where.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535:
        raise StateDirError(
            "settings-invalid",
            f"server.tls_listen is {where!r}",
            "set server.tls_listen to HOST:PORT, for example to 0.0.0.0:7443",
        )
    return host.strip("[]"), int(port)


def told_address(settings: Settings, host: str, port: int) -> str:
    """Return the address that nodes must use if the server listens on `host` and `port`. Raises
    StateDirError.
    """
    told = settings.text("server.advertise") or f"https://{_reachable(host)}:{port}"
    if not told.startswith("https://"):
        raise StateDirError(
            "settings-invalid",
            f"server.advertise is {told!r}",
            "write https://name-or-address:port",
        )
    return told.rstrip("/")


def _reachable(host: str) -> str:
    """Return the host name or address at which nodes can reach the server: `host` or, if `host`
    stands for all addresses, the address from which this machine sends data.
    """
    if host not in ("", "0.0.0.0", "::"):
        return f"[{host}]" if ":" in host else host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(
                ("192.0.2.1", 9)
            )  # no data is sent; RFC 5737 reserves this address for documentation
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


class NodeRouteFilter:
    """Refuses requests to users' routes on this listener, even if they have a valid token. Requests
    that another server has forwarded are accepted.
    """

    def __init__(self, auth: ASGIApp) -> None:
        self._auth = auth

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if (
            _is_download(scope["path"])
            if scope.get(ONLY_DOWNLOADS)
            else _is_for_nodes(scope["path"]) or is_passed_on(scope)
        ):
            await self._auth(scope, receive, send)
            return
        problem = ApiProblem("not-found", "this address accepts only requests of nodes")
        body = ErrorBody(code=problem.code, message=problem.message, hint=problem.hint)
        await reply(body, problem.status, {"Connection": "close"})(scope, receive, send)


def _is_for_nodes(path: str) -> bool:
    return path == HEALTH or path.startswith((*_OPEN, *list_own_roots()))


def _is_download(path: str) -> bool:
    """Return whether the path belongs to a file named by its hash, or to the script that joins a
    machine.
    """
    return path.startswith(BOOT) or (path.startswith(NODES) and path.endswith("/script"))


_PAUSE_S = 0.2
_log = logging.getLogger(__name__)


class MachineSocket:
    """Serves `app` on the Unix socket `path` from the call `update(True)` to the call
    `update(False)`. `end_polls` answers the agents' long polls."""

    def __init__(self, app: Any, path: str, end_polls: Callable[[], None]) -> None:
        self._app = app
        self._path = path
        self._end_polls = end_polls
        self._server: BoundedServer | None = None
        self._file: tuple[int, int] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def update(self, mine: bool) -> None:
        """Start or stop serving. If another server has left a socket file at this path, the file is
        replaced, even if this server serves already: it may have lost the machine to another server
        and got it back before it noticed, such as after the computer was suspended.
        """
        from cavvy.server.doors import BoundedServer

        if self._server is not None and not (mine and self._file == _identify(self._path)):
            self._server.should_exit = True
            self._start(self._end_all_polls(frozenset(self._tasks)))
            self._server = None
        if mine and self._server is None:
            self._server = BoundedServer(self._app)
            self._start(self._server.serve([listen_at(self._path)]))
            self._file = _identify(self._path)
            _log.info("serving the agents on this machine", extra={"address": self._path})

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _end_all_polls(self, serving: Collection[asyncio.Task[None]]) -> None:
        """Answer the agents' polls until `serving` has ended. Repeats this, because an agent may
        poll again until the server has noticed that it must end.
        """
        while not all(each.done() for each in serving):
            self._end_polls()
            await asyncio.wait(serving, timeout=_PAUSE_S)

    async def close(self) -> None:
        """Stop serving. The socket file is kept for the next server."""
        self.update(False)
        if self._tasks:
            await asyncio.wait(self._tasks)


def _identify(path: str) -> tuple[int, int] | None:
    """Return what identifies the file at the path, or None if there is no file. A listening socket
    keeps its file's number in use after the file has been replaced."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino

"""The address where nodes from outside arrive, and what may pass there: agents' routes and files by hash, no users."""

import socket
from collections.abc import Callable
from functools import cache
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from remuda.api.errors import Problem
from remuda.api.gate import AGENT, BOOT, HEALTH, NODES
from remuda.api.home import Home, HomeError
from remuda.api.outside.certificate import Certificate, load_certificate
from remuda.api.outside.shelf import Shelf
from remuda.api.tokens import Tokens
from remuda.api.wire import reply
from remuda.client.wire import ErrorBody
from remuda.providers.base import Outside
from remuda.providers.hosts.parcels import pack_python, platform
from remuda.settings import Settings

_OPEN = (AGENT, BOOT, NODES)


class OutsideListener:
    """A bound TCP socket, not served yet, and the certificate it will be served with."""

    def __init__(self, sock: socket.socket, address: str, certificate: Certificate) -> None:
        self.sock = sock
        self.address = address  # that nodes are told
        self.certificate = certificate

    def describe(self, shelf: Shelf, tokens: Tokens, archive: Callable[[], bytes], cached: Path) -> Outside:
        """What providers are told of it; the agent and the Python are packed when the first of them asks."""

        def pythons() -> dict[str, str]:
            cached.mkdir(mode=0o700, parents=True, exist_ok=True)
            return {platform(): shelf.put(pack_python(cached).content)}

        return Outside(
            address=self.address,
            pin=self.certificate.pin,
            key_pin=self.certificate.key_pin,
            agent=cache(lambda: shelf.put(archive())),
            pythons=cache(pythons),
            shelve=shelf.put,
            claim_token=tokens.of_claim,
        )


def listen_outside(home: Home, settings: Settings) -> OutsideListener | None:
    """Bind where `server.tls_listen` says; None where it says nothing. Raises HomeError."""
    where = settings.text("server.tls_listen")
    if not where:
        return None
    host, _, port = where.rpartition(":")
    host = host.strip("[]")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.create_server((host, int(port)), family=family, backlog=1024)
        certificate = load_certificate(home.file("tls.pem"))
    except (ValueError, OverflowError) as error:
        raise HomeError(
            "settings-invalid",
            f"server.tls_listen is {where!r}, or {home.file('tls.pem')} is damaged: {error}",
            "write 0.0.0.0:7443; a damaged tls.pem can be deleted, which dismisses agents that know it",
        ) from error
    except OSError as error:
        raise HomeError(
            "settings-invalid",
            f"cannot listen on {where}: {error.strerror}",
            "choose another address or port for server.tls_listen",
        ) from error
    sock.setblocking(False)
    told = settings.text("server.advertise") or f"https://{_reachable(host)}:{sock.getsockname()[1]}"
    if not told.startswith("https://"):
        raise HomeError("settings-invalid", f"server.advertise is {told!r}", "write https://name-or-address:port")
    return OutsideListener(sock, told.rstrip("/"), certificate)


def _reachable(host: str) -> str:
    """The address itself, or for `all addresses` the one that this machine would use towards others."""
    if host not in ("", "0.0.0.0", "::"):
        return f"[{host}]" if ":" in host else host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing; a documentation address, RFC 5737
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


class OutsideGate:
    """Before the gate, at that address only: users' routes are not there, whatever token is shown."""

    def __init__(self, gate: ASGIApp) -> None:
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if scope["path"] == HEALTH or scope["path"].startswith(_OPEN):
            await self._gate(scope, receive, send)
            return
        problem = Problem("not-found", "only nodes are answered at this address")
        body = ErrorBody(code=problem.code, message=problem.message, hint=problem.hint)
        await reply(body, problem.status, {"Connection": "close"})(scope, receive, send)

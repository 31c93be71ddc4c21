"""Lets users run commands on nodes that are connected to a peer, another server of the database.

The server that received the user's request manages the command; the command's ID ends with this
server's ID. The server announces the command to its peers. The peer to which the node's agent is
connected requests the command with the agent's own token, and sends the command to the agent. If a
server receives a request about a command that it does not manage, the server forwards the request
to the server that manages the command.

Peers on one machine use their Unix sockets. Peers on other machines use their listeners for nodes,
which all have the same certificate. A user's request is forwarded with a short-lived token for this
one request, because the forwarding server has already checked the user's rights. Requests between
providers (`provider_peers`) also have a short-lived token.
"""

import asyncio
import logging
import re
import ssl
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from functools import cached_property
from hashlib import sha256
from hmac import compare_digest
from secrets import token_hex
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from cavvy.api.errors import ApiProblem
from cavvy.api.tokens import GangTokens
from cavvy.control.share import WorkShare
from cavvy.store.channel import ServerSignal, SignalKind
from cavvy.store.leases import Replica

PEER = b"cavvy-peer"  # the header with the token of a request that a peer has forwarded
# requests that may be forwarded: users' requests about running commands
_OF_USERS = re.compile(r"/v1/projects/[^/]+/jobs/[^/]+/exec/[^/]+(/input)?")
# in seconds; longer than the maximum difference between the clocks of servers
_VALID = timedelta(seconds=30)
_CONNECT_S = 5.0
_ANSWER_S = 90.0  # timeout in seconds; the longest poll takes 60 s
# timeout in seconds of a command's fetch, because the agent waits for its orders meanwhile
_FETCH_S = 3.0
_REMEMBERED_S = (
    30.0  # seconds for which an announcement is valid; it is repeated while the user waits
)
_MOST_ANNOUNCED = 1000
_NAME = "cavvy"  # the name in the certificate of the listener for nodes
_log = logging.getLogger(__name__)


class PeerServers:
    """The other servers of the database, and the commands that these servers have announced.
    `share` is None if there are no other servers; `certificate` is the file with the certificate of
    the listeners for nodes.
    """

    def __init__(self, share: WorkShare | None, tokens: GangTokens, certificate: str) -> None:
        self._share, self._tokens, self._certificate = share, tokens, certificate
        # (gang, rank) -> the IDs of commands that peers keep, and the time of each announcement
        self._announced: dict[tuple[str, int], dict[str, float]] = {}
        self.on_news: Callable[[str], None] = lambda gang: None
        if share is not None:
            self._listen(share)

    def _listen(self, share: WorkShare) -> None:
        others = share.on_signal

        def receive(signal: ServerSignal) -> None:
            if signal.kind is SignalKind.EXEC:
                self._hear(signal.key)
            others(signal)

        share.on_signal = receive

    @property
    def exist(self) -> bool:
        """Whether other servers can use the database."""
        return self._share is not None

    def make_id(self) -> str:
        """Return an ID for a command that this server manages."""
        return token_hex(8) if self._share is None else f"{token_hex(8)}-{self._share.me.id}"

    def find_keeper(self, exec_id: str) -> Replica | None:
        """Return the other server that manages this command, or None if this server manages the
        command or the other server has ended. A server whose registration has ended may come back
        and still has its commands, so for a minute it counts as the server of its commands.
        """
        server = exec_id.partition("-")[2]
        if self._share is None or not server or server == self._share.me.id:
            return None
        return self._share.find_recent(server)

    def reaches_me(self, server: Replica) -> bool:
        """Return whether this peer can request commands from this server."""
        if self._share is None or server.peer is None:  # an older program
            return False
        return server.host == self._share.me.host or bool(self._share.me.peer)

    def announce(self, exec_id: str, gang: str, rank: int) -> None:
        """Announce to the peers a command that this server has for a rank."""
        if self._share is not None:
            self._share.send(SignalKind.EXEC, f"{gang} {rank} {exec_id}")

    def expects(self, gang: str, rank: int) -> bool:
        """Return whether a peer has announced a command for this rank."""
        return bool(self._announced.get((gang, rank)))

    async def fetch(self, request: Request, gang: str, rank: int) -> list[bytes]:
        """Fetch the announced commands for this rank from the servers that manage the commands, and
        return the commands as JSON. `request` comes from the rank's agent. Commands that cannot be
        fetched now will be announced again.
        """
        ids = self._announced.pop((gang, rank), {})
        found = await asyncio.gather(*(self._fetch(request, gang, rank, each) for each in ids))
        return [each for each in found if each]

    async def _fetch(self, request: Request, gang: str, rank: int, exec_id: str) -> bytes:
        """Fetch one command, or return b"" if it cannot be fetched."""
        if (keeper := self.find_keeper(exec_id)) is None:
            return b""
        target = f"/agent/v1/execs/{exec_id}?gang={gang}&rank={rank}"
        try:
            async with asyncio.timeout(_FETCH_S):
                answer = await self._ask(keeper, "GET", target, _of_agent(request), b"")
        except (OSError, ValueError) as error:
            _log.warning(
                "server %s does not answer a request for a command: %s",
                keeper.id,
                str(error) or type(error).__name__,
            )
            return b""
        return bytes(answer.body) if answer.status_code == 200 else b""

    async def pass_on(self, request: Request, keeper: Replica, body: bytes = b"") -> Response:
        """Forward the request to `keeper`, and return its answer. Raises ApiProblem."""
        scope = request.scope
        target = _target(scope)
        if "gang_token" in scope:
            headers = _of_agent(request)
        elif scope.get("peer"):
            raise ApiProblem("agent-elsewhere", "the request was already forwarded")
        else:
            now = request.app.state.app_state.now()
            headers = {PEER.decode(): self._make_token(scope["method"], target, now + _VALID)}
        try:
            return await self._ask(keeper, scope["method"], target, headers, body)
        except (OSError, ValueError) as error:
            told = (
                f"the server with process {keeper.pid} on {keeper.host}, which manages the command"
            )
            # An agent stops its work after status 409, but repeats the request after status 503.
            raise ApiProblem("peer-unreachable", f"{told}, does not answer: {error}") from error

    async def send(self, server: Replica, target: str, body: bytes, now: datetime) -> Response:
        """Send a request to another server on behalf of this server, not of a user or an
        agent. Raises OSError, ValueError.
        """
        token = self._make_token("POST", _signed(target, body), now + _VALID)
        return await self._ask(server, "POST", target, {PEER.decode(): token}, body)

    def sent(self, scope: Scope, token: bytes, body: bytes, now: datetime) -> bool:
        """Return whether this request was sent by the method `send` of another server. Raises
        ApiProblem if the clocks of the servers differ too much.
        """
        return self._fits(token, scope["method"], _signed(_target(scope), body), now)

    def accepts(self, scope: Scope, token: bytes, now: datetime) -> bool:
        """Return whether a peer has forwarded this request and confirms the user's rights. Raises
        ApiProblem if the clocks of the servers differ too much.
        """
        return is_passed_on(scope) and self._fits(token, scope["method"], _target(scope), now)

    def _fits(self, token: bytes, method: str, text: str, now: datetime) -> bool:
        until = token.partition(b".")[0]
        if not until.isdigit() or len(until) > 12:
            return False
        seconds = int(until)
        wanted = self._sign(method, text, seconds).encode()
        if not compare_digest(token, wanted):
            return False
        limit_s = _VALID.total_seconds()
        apart_s = abs(seconds - limit_s - now.timestamp())
        if apart_s >= limit_s:
            raise ApiProblem(
                "forbidden",
                f"the clock of the server that forwarded this request differs by {apart_s:.0f} s "
                f"from the clock of this server; expected less than {limit_s:.0f} s",
                "synchronise the clocks of the servers' machines, for example with NTP",
            )
        return True

    def _make_token(self, method: str, target: str, until: datetime) -> str:
        return self._sign(method, target, int(until.timestamp()))

    def _sign(self, method: str, target: str, until: int) -> str:
        return f"{until}.{self._tokens.of_peer(f'{until} {method} {target}')}"

    def _hear(self, key: str) -> None:
        gang, _, rest = key.partition(" ")
        rank, _, exec_id = rest.partition(" ")
        if not rank.isdecimal() or self.find_keeper(exec_id) is None:
            return
        now = time.monotonic()
        for place, execs in list(self._announced.items()):
            fresh = {each: at for each, at in execs.items() if now - at < _REMEMBERED_S}
            self._announced[place] = fresh
            if not fresh:
                del self._announced[place]
        if len(self._announced) < _MOST_ANNOUNCED:
            self._announced.setdefault((gang, int(rank)), {})[exec_id] = now
            self.on_news(gang)

    async def _ask(
        self, server: Replica, method: str, target: str, headers: Mapping[str, str], body: bytes
    ) -> Response:
        """Send one request. Raises OSError, ValueError."""
        async with asyncio.timeout(_CONNECT_S):
            reader, writer = await self._connect(server)
        try:
            lines = [f"{method} {target} HTTP/1.1", f"Host: {_NAME}", "Connection: close"]
            lines += [f"{name}: {value}" for name, value in headers.items()]
            lines += [f"Content-Length: {len(body)}", "", ""]
            writer.write("\r\n".join(lines).encode("latin-1") + body)
            async with asyncio.timeout(_ANSWER_S):
                return _read_answer(await reader.read(-1))
        finally:
            writer.close()

    async def _connect(self, server: Replica) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        assert self._share is not None
        if server.host == self._share.me.host:
            return await asyncio.open_unix_connection(server.address.removeprefix("unix:"))
        where = urlsplit(server.peer or "")
        if not where.hostname:
            raise OSError("the server has no address for other machines: set server.tls_listen")
        return await asyncio.open_connection(
            where.hostname, where.port, ssl=self._tls, server_hostname=_NAME
        )

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        """Trusts only the certificate that the servers share."""
        return ssl.create_default_context(cafile=self._certificate)


def is_passed_on(scope: Scope) -> bool:
    """Return whether a peer has marked the request as forwarded and the path permits forwarding."""
    return passed_token(scope) is not None and bool(_OF_USERS.fullmatch(scope["path"]))


def passed_token(scope: Scope) -> bytes | None:
    """Return the peer's token in a request."""
    return next((bytes(value) for name, value in scope["headers"] if name == PEER), None)


def _signed(target: str, body: bytes) -> str:
    """Return the text that a server signs for a request. Two different requests never have the same
    signed text, because the target of a request contains no space.
    """
    return f"{target} {sha256(body).hexdigest()}"


def _target(scope: Scope) -> str:
    path, query = scope["raw_path"].decode("latin-1"), scope["query_string"].decode("latin-1")
    return f"{path}?{query}" if query else path


def _of_agent(request: Request) -> dict[str, str]:
    names = ("authorization", "cavvy-agent-protocol")
    return {name: request.headers[name] for name in names if name in request.headers}


def _read_answer(data: bytes) -> Response:
    """Return the peer's answer in the form that this server forwards. Raises ValueError."""
    head, end, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    status = first.split(" ")[1:2]
    if not end or not status or not status[0].isdigit():
        raise ValueError("the answer is not complete")
    told = {name.lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)}
    if told.get("content-length") != str(len(body)):
        raise ValueError("the answer is not complete")
    kept = {"Cavvy-Exit-Code": told["cavvy-exit-code"]} if "cavvy-exit-code" in told else {}
    return Response(body, int(status[0]), kept, told.get("content-type"))

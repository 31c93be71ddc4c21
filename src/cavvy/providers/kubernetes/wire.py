"""A small HTTP client for API servers, based on asyncio streams: requests, watches and
WebSockets.
"""

import asyncio
import base64
import os
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager, suppress
from urllib.parse import SplitResult, unquote, urlsplit

import httptools

from cavvy.domain.values import Struct

_CHUNK = 64 * 1024
_CONNECT_S = 10.0
_LIMIT = 16 * 1024 * 1024
# The kernel probes a connection that is silent for 30 s, and closes it after another 40 s without a
# reply. The kernel also closes a connection on which sent data is not acknowledged within a minute.
_ALIVE = (
    ("TCP_KEEPIDLE", 30),
    ("TCP_KEEPINTVL", 10),
    ("TCP_KEEPCNT", 4),
    ("TCP_USER_TIMEOUT", 60_000),
)
_CLOSE, _PING, _PONG = 8, 9, 10
_BINARY = 2
_UPGRADE = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class ConnectionBroken(Exception):
    """Raised if a connection could not be opened, or was lost. The server may or may not have
    executed the request.
    """


class UpgradeRefused(Exception):
    """Raised if the server answered a WebSocket handshake with an ordinary response."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"status {status}")
        self.status = status
        self.body = body


@contextmanager
def _reports(what: str) -> Iterator[None]:
    """Convert errors of streams, including TLS errors and timeouts, to ConnectionBroken."""
    try:
        yield
    except (OSError, EOFError, asyncio.LimitOverrunError) as error:
        raise ConnectionBroken(f"{what}: {str(error) or 'no answer'}") from error


class ServerEndpoint(Struct, frozen=True, kw_only=True):
    """The address of an API server. `proxy` has the form http://[user:password@]host:port."""

    url: str
    tls: ssl.SSLContext | None
    server_name: str | None = None
    proxy: str | None = None

    async def connect(self) -> "ServerConnection":
        """Connect to the API server, through the proxy if one is set. Raises ConnectionBroken."""
        url = urlsplit(self.url)
        host, port = url.hostname or "", url.port or (443 if self.tls else 80)
        name = (self.server_name or host) if self.tls else None
        with _reports(f"{self.url} cannot be reached"):
            async with asyncio.timeout(_CONNECT_S):
                reader, writer = (
                    await asyncio.open_connection(
                        host, port, ssl=self.tls, server_hostname=name, limit=_LIMIT
                    )
                    if self.proxy is None
                    else await self._tunnel(urlsplit(self.proxy), host, port, name)
                )
        _probe_when_silent(writer)
        return ServerConnection(reader, writer)

    async def _tunnel(self, proxy: SplitResult, host: str, port: int, name: str | None) -> Streams:
        """Open a tunnel through a proxy, by CONNECT (RFC 9110, 9.3.6)."""
        reader, writer = await asyncio.open_connection(
            proxy.hostname, proxy.port or 80, limit=_LIMIT
        )
        target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        user = f"{unquote(proxy.username or '')}:{unquote(proxy.password or '')}"
        headers = {"Proxy-Authorization": basic(user)} if proxy.username else {}
        try:
            writer.write(make_head("CONNECT", target, target, headers))
            answer = (await reader.readuntil(b"\r\n\r\n")).partition(b"\r\n")[0].decode("latin-1")
            if answer.split(" ")[1:2] != ["200"]:
                raise ConnectionRefusedError(f"the proxy {proxy.hostname} answered {answer!r}")
            if self.tls is not None:
                await writer.start_tls(self.tls, server_hostname=name)
        except BaseException:
            writer.close()
            raise
        return reader, writer


def _probe_when_silent(writer: asyncio.StreamWriter) -> None:
    """Enable TCP keepalive, so that a watch or a tunnel notices a lost connection."""
    line = writer.get_extra_info("socket")
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _ALIVE:
        if hasattr(socket, name):  # not every operating system has all of these options
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class _Response:
    """One response, filled in by callbacks from the parser."""

    def __init__(self) -> None:
        self.body = bytearray()
        self.headed = self.complete = False
        self.parser = httptools.HttpResponseParser(self)

    def on_headers_complete(self) -> None:
        self.headed = True

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.complete = True


class ServerConnection:
    """One connection, which handles one exchange at a time. Methods raise ConnectionBroken."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @property
    def usable(self) -> bool:
        return not self._reader.at_eof() and not self._writer.is_closing()

    async def exchange(self, head: bytes, body: bytes) -> tuple[int, bytes, bool]:
        """Send a request. Return the status, the body, and whether the connection can be reused."""
        response = await self._send(head, body)
        while not response.complete:
            await self._feed(response)
        parser = response.parser
        return parser.get_status_code(), bytes(response.body), parser.should_keep_alive()

    async def lines(self, head: bytes) -> AsyncIterator[tuple[int, bytes]]:
        """Send a request whose response does not end, and yield the response's lines as they
        arrive, each with the HTTP status.
        """
        response = await self._send(head, b"")
        status, body = response.parser.get_status_code(), response.body
        while True:
            while (end := body.find(b"\n")) >= 0:
                line = bytes(body[:end])
                del body[: end + 1]
                yield status, line
            if response.complete:
                if body:
                    yield status, bytes(body)
                return
            await self._feed(response)

    async def upgrade(self, head: bytes) -> "WebSocket":
        """Turn the connection into a WebSocket. Raises UpgradeRefused if the server declines."""
        with _reports("the connection broke"):
            self._writer.write(head)
            await self._writer.drain()
            answer = await self._reader.readuntil(b"\r\n\r\n")
        status = int(answer.split(b" ", 2)[1])
        if status == 101:
            return WebSocket(self._reader, self._writer)
        response = _Response()
        response.parser.feed_data(answer)
        while not response.complete:
            await self._feed(response)
        raise UpgradeRefused(status, bytes(response.body))

    async def close(self) -> None:
        await _close(self._writer)

    async def _send(self, head: bytes, body: bytes) -> _Response:
        with _reports("the connection broke"):
            self._writer.write(head + body)
            await self._writer.drain()
        response = _Response()
        while not response.headed:
            await self._feed(response)
        return response

    async def _feed(self, response: _Response) -> None:
        with _reports("the connection broke"):
            data = await self._reader.read(_CHUNK)
        if not data:
            raise ConnectionBroken("the connection was closed before the response was complete")
        try:
            response.parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise ConnectionBroken(f"the response is not HTTP: {error}") from error


class WebSocket:
    """A stream of messages in both directions. The first byte of each message is the number of a
    channel in Kubernetes' stream protocol.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, channel: int, data: bytes) -> None:
        """Send data on a channel. Raises ConnectionBroken."""
        with _reports("the stream broke"):
            self._frame(_BINARY, bytes([channel]) + data)
            await self._writer.drain()

    async def receive(self) -> tuple[int, bytes] | None:
        """Return the next message as (channel, data), or None after the server closed the stream.
        Raises ConnectionBroken.
        """
        message = b""
        while True:
            with _reports("the stream broke"):
                first, length = await self._reader.readexactly(2)
                if length >= 126:
                    size, form = (2, "!H") if length == 126 else (8, "!Q")
                    (length,) = struct.unpack(form, await self._reader.readexactly(size))
                data = await self._reader.readexactly(length)
            code = first & 15
            if code == _CLOSE:
                return None
            if code == _PING:
                self._frame(_PONG, data)
            elif code != _PONG:
                message += data
                if first & 128 and message:
                    return message[0], message[1:]

    async def close(self) -> None:
        with suppress(OSError, RuntimeError):
            self._frame(_CLOSE, b"\x03\xe8")
        await _close(self._writer)

    def _frame(self, code: int, data: bytes) -> None:
        length, flags = len(data), 128 | code
        if length < 126:
            head = struct.pack("!BB", flags, 128 | length)
        elif length < 65536:
            head = struct.pack("!BBH", flags, 128 | 126, length)
        else:
            head = struct.pack("!BBQ", flags, 128 | 127, length)
        # WebSocket frames must have a mask, which only protects against faulty proxies of
        # unencrypted HTTP. A mask of zeros is valid and needs no computation.
        self._writer.write(head + b"\0\0\0\0" + data)


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(OSError):
        async with asyncio.timeout(1):
            await writer.wait_closed()


def basic(user: str) -> str:
    """Return the Authorization header's value for USER:PASSWORD."""
    return "Basic " + base64.b64encode(user.encode()).decode()


def upgrade_headers(protocol: str) -> dict[str, str]:
    """Return the headers that request a WebSocket with this subprotocol."""
    key = base64.b64encode(os.urandom(16)).decode()
    return {**_UPGRADE, "Sec-WebSocket-Key": key, "Sec-WebSocket-Protocol": protocol}


def make_head(
    method: str, path: str, host: str, headers: Mapping[str, str], length: int = 0
) -> bytes:
    """Return the head of a request, including the empty line that ends it."""
    fields = {"Host": host, **headers}
    if length or method in ("POST", "PUT", "PATCH"):
        fields["Content-Length"] = str(length)
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

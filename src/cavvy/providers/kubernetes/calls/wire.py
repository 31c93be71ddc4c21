"""A small HTTP client for API servers: requests, watches and WebSockets over asyncio's streams."""

import asyncio
import base64
import os
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import SplitResult, unquote, urlsplit

import httptools

_CHUNK = 64 * 1024
_CONNECT_S = 10.0
_LIMIT = 16 * 1024 * 1024
# Asked whether it is there after 30 s of silence, and given up a good half minute later; what is
# sent, after a minute.
_ALIVE = (
    ("TCP_KEEPIDLE", 30),
    ("TCP_KEEPINTVL", 10),
    ("TCP_KEEPCNT", 4),
    ("TCP_USER_TIMEOUT", 60_000),
)
_CLOSE, _PING, _PONG = 8, 9, 10
_BINARY = 2


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class ConnectionBroken(Exception):
    """A connection could not be made or broke; nothing is known of the request's effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerEndpoint:
    """Where to connect to."""

    url: str
    tls: ssl.SSLContext | None
    server_name: str | None = None
    proxy: str | None = None  # http://[user:password@]host:port

    async def connect(self) -> "ServerConnection":
        url = urlsplit(self.url)
        port = url.port or (443 if self.tls else 80)
        name = (self.server_name or url.hostname) if self.tls else None
        try:
            async with asyncio.timeout(_CONNECT_S):
                if self.proxy is not None:
                    return ServerConnection(
                        *await self._dig(urlsplit(self.proxy), url.hostname or "", port, name)
                    )
                reader, writer = await asyncio.open_connection(
                    url.hostname, port, ssl=self.tls, server_hostname=name, limit=_LIMIT
                )
                _notice_death(writer)
        except (OSError, TimeoutError) as error:  # TLS errors are OSErrors too
            raise ConnectionBroken(
                f"{self.url} cannot be reached: {error or 'no answer'}"
            ) from error
        return ServerConnection(reader, writer)

    async def _dig(self, proxy: SplitResult, host: str, port: int, name: str | None) -> Streams:
        """A way through a proxy, as RFC 9110 has it in 9.3.6."""
        reader, writer = await asyncio.open_connection(
            proxy.hostname, proxy.port or 80, limit=_LIMIT
        )
        _notice_death(writer)
        target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        user = f"{unquote(proxy.username or '')}:{unquote(proxy.password or '')}".encode()
        shown = (
            {"Proxy-Authorization": "Basic " + base64.b64encode(user).decode()}
            if proxy.username
            else {}
        )
        try:
            writer.write(make_head("CONNECT", target, target, shown, 0))
            answer = (await reader.readuntil(b"\r\n\r\n")).partition(b"\r\n")[0].decode("latin-1")
            if answer.split(" ")[1:2] != ["200"]:
                raise ConnectionBroken(
                    f"{self.url} cannot be reached: the proxy {proxy.hostname} says {answer!r}"
                )
            if self.tls is not None:
                await writer.start_tls(self.tls, server_hostname=name)
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            writer.close()
            raise ConnectionBroken(
                f"{self.url} cannot be reached: the proxy {proxy.hostname} does not answer"
            ) from error
        except (ConnectionBroken, OSError):
            writer.close()
            raise
        return reader, writer


def _notice_death(writer: asyncio.StreamWriter) -> None:
    """A watch or a pod's line that waits for the other side breaks when the network between has
    forgotten it.
    """
    line = writer.get_extra_info("socket")
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _ALIVE:
        if hasattr(socket, name):  # not every system has all of them
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


@dataclass(slots=True)
class _Reply:
    """What the parser calls back while a response arrives."""

    body: bytearray = field(default_factory=bytearray)
    headed: bool = False
    complete: bool = False

    def on_headers_complete(self) -> None:
        self.headed = True

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.complete = True


class ServerConnection:
    """One connection, for one exchange at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @property
    def usable(self) -> bool:
        return not self._reader.at_eof() and not self._writer.is_closing()

    async def exchange(self, head: bytes, body: bytes) -> tuple[int, bytes, bool]:
        """Status, body, and whether the connection can be used again. Raises ConnectionBroken."""
        parser, reply = await self._send(head, body)
        while not reply.complete:
            await self._feed(parser, reply)
        return parser.get_status_code(), bytes(reply.body), parser.should_keep_alive()

    async def lines(self, head: bytes) -> AsyncIterator[tuple[int, bytes]]:
        """The lines of an answer that goes on and on, each with the status. Raises ConnectionBroken
        where it breaks off.
        """
        parser, reply = await self._send(head, b"")
        while True:
            while (end := reply.body.find(b"\n")) >= 0:
                line = bytes(reply.body[:end])
                del reply.body[: end + 1]
                yield parser.get_status_code(), line
            if reply.complete:
                if reply.body:
                    yield parser.get_status_code(), bytes(reply.body)
                return
            await self._feed(parser, reply)

    async def upgrade(self, head: bytes) -> "WebSocket":
        """Turn the connection into a WebSocket. Raises UpgradeRefused where the server answers
        something else, ConnectionBroken.
        """
        key = base64.b64encode(os.urandom(16))
        upgrade = (
            b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: "
            b"13\r\nSec-WebSocket-Key: "
        )
        try:
            self._writer.write(head.removesuffix(b"\r\n") + upgrade + key + b"\r\n\r\n")
            await self._writer.drain()
            answer = await self._reader.readuntil(b"\r\n\r\n")
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            raise ConnectionBroken(f"the connection broke: {error}") from error
        status = int(answer.split(b" ", 2)[1])
        if status == 101:
            return WebSocket(self._reader, self._writer)
        parser, reply = _make_parser()
        parser.feed_data(answer)
        while not reply.complete:
            await self._feed(parser, reply)
        raise UpgradeRefused(status, bytes(reply.body))

    async def close(self) -> None:
        self._writer.close()
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(1):
                await self._writer.wait_closed()

    async def _send(self, head: bytes, body: bytes) -> tuple[httptools.HttpResponseParser, _Reply]:
        try:
            self._writer.write(head + body)
            await self._writer.drain()
        except OSError as error:
            raise ConnectionBroken(f"the connection broke: {error}") from error
        parser, reply = _make_parser()
        while not reply.headed:
            await self._feed(parser, reply)
        return parser, reply

    async def _feed(self, parser: httptools.HttpResponseParser, reply: _Reply) -> None:
        try:
            data = await self._reader.read(_CHUNK)
        except OSError as error:
            raise ConnectionBroken(f"the connection broke: {error}") from error
        if not data:
            raise ConnectionBroken("the connection was closed before the answer was whole")
        try:
            parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise ConnectionBroken(f"an answer that is not HTTP: {error}") from error


def _make_parser() -> tuple[httptools.HttpResponseParser, _Reply]:
    reply = _Reply()
    return httptools.HttpResponseParser(reply), reply


class UpgradeRefused(Exception):
    """The server did not want a WebSocket."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"status {status}")
        self.status = status
        self.body = body


class WebSocket:
    """Messages both ways; the first byte of each names a channel, as Kubernetes has it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def send(self, channel: int, data: bytes) -> None:
        """Raises ConnectionBroken."""
        try:
            self._frame(_BINARY, bytes([channel]) + data)
            await self._writer.drain()
        except OSError as error:
            raise ConnectionBroken(f"the stream broke: {error}") from error

    async def receive(self) -> tuple[int, bytes] | None:
        """The next message; None when the other side has closed. Raises ConnectionBroken."""
        whole = b""
        while True:
            try:
                first, second = await self._reader.readexactly(2)
                length = second & 127
                if length == 126:
                    (length,) = struct.unpack("!H", await self._reader.readexactly(2))
                elif length == 127:
                    (length,) = struct.unpack("!Q", await self._reader.readexactly(8))
                data = await self._reader.readexactly(length)
            except (OSError, asyncio.IncompleteReadError) as error:
                raise ConnectionBroken(f"the stream broke: {error}") from error
            code = first & 15
            if code == _CLOSE:
                return None
            if code == _PING:
                self._frame(_PONG, data)
            elif code != _PONG:
                whole += data
                if first & 128 and whole:
                    return whole[0], whole[1:]

    async def close(self) -> None:
        with suppress(OSError, RuntimeError):
            self._frame(_CLOSE, b"\x03\xe8")
        self._writer.close()
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(1):
                await self._writer.wait_closed()

    def _frame(self, code: int, data: bytes) -> None:
        length = len(data)
        if length < 126:
            head = struct.pack("!BB", 128 | code, 128 | length)
        elif length < 65536:
            head = struct.pack("!BBH", 128 | code, 128 | 126, length)
        else:
            head = struct.pack("!BBQ", 128 | code, 128 | 127, length)
        # The mask is there to confuse bad proxies of plain HTTP; of zeros it costs nothing.
        self._writer.write(head + b"\0\0\0\0" + data)


def make_head(method: str, path: str, host: str, headers: Mapping[str, str], length: int) -> bytes:
    """The head of a request, as far as its empty line."""
    lines = [
        f"{method} {path} HTTP/1.1",
        f"Host: {host}",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    if length or method in ("POST", "PUT", "PATCH"):
        lines.append(f"Content-Length: {length}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

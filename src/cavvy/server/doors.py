"""Limits the resources that a connection can use before it has shown a token. The limits apply to
the size and duration of a request's head (its first line and headers), the duration of a TLS
handshake, the number of connections without a request, and the share of the event loop.

The limits are needed because uvicorn limits neither the size of a header nor the time until the
header is complete. Whenever data arrives, httptools copies all earlier parts of an unfinished
header again. A header of 64 MiB could therefore block the thread that serves all requests for 30 s.
256 KiB of data can contain 10,000 requests or 40,000 chunks of a body. If the server closes a TLS
connection, further data is read and decrypted until the peer also closes the connection.

Opens the TCP ports on which the server listens, and reserves ports for replicas.
"""

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
import time
from typing import Any, Protocol

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from cavvy.api.auth import is_open
from cavvy.api.wire import ARRIVED
from cavvy.server.state_dir import peer_is_us
from cavvy.server.turns import Handshakes, Turns, Waiting, find_origin

# maximum bytes of a head; the limits of other programs: Cavvy's client 64 KiB, nginx 32 KiB, h11 64
# KiB
HEAD_BYTES = 64 * 1024
HEADERS = 100  # maximum number of headers; http.client and Apache have the same limit
HEAD_S = 10.0  # maximum seconds for a complete head
PIPELINED = 8  # maximum number of requests that wait for the answers to earlier ones
PIECE = 8 * 1024  # bytes that are parsed in one turn
_NO_BODY = [(b"content-length", b"0"), (b"connection", b"close"), (b"retry-after", b"1")]
_LINGER_S = 1.0  # seconds after its last answer until a connection is aborted
_DISCARDED = 1024 * 1024  # maximum bytes of a body that are read after its answer was sent

_log = logging.getLogger(__name__)

# The system can give a port that is in none of its programs' settings to an outgoing connection
# while the server restarts. Most of these connections end soon.
WAIT_S = 5.0
_PAUSE_S = 0.1
LOCAL = "127.0.0.1"


class ListenerTls(Protocol):
    """The TLS contexts of a listener."""

    strict: ssl.SSLContext  # the context with which each connection starts

    def only_downloads(self, connection: object) -> bool:
        """Return whether this TLS connection is limited to downloads of files by their hash."""
        ...


class BoundedHttp(HttpToolsProtocol):
    """uvicorn's HTTP protocol, with limits on a request's head: its bytes, the number of headers,
    and the time until the head is complete.
    """

    waiting: Waiting
    turns: Turns
    scope_mark = ""  # the key that marks a request's scope if the connection is restricted
    doors: ListenerTls | None = None

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._inner, self.app = self.app, self._serve
        self._refusal = 0  # the HTTP status of the refusal; 0 if the head is accepted
        self._head = 0  # bytes of this head so far
        self._rest = 0  # bytes received since the last complete header line
        self._discarded = 0
        self._whole = True  # whether the last request was read to its end
        self._in_head = False
        self._proven = False  # whether a request on this connection had a valid token
        self._timer: asyncio.TimerHandle | None = None
        self._address = ""
        self._status = 0  # the HTTP status of the last answer
        self._held = b""  # data that was received before it was the connection's turn
        # the object that `waiting` counts; for a TLS connection, the socket
        self.place: object = self

    def connection_made(self, transport: Any) -> None:
        """Accept the connection, unless it comes from a process of another user."""
        connection = transport.get_extra_info("socket")
        if connection is not None and not peer_is_us(connection):
            transport.abort()
            return
        self._address = find_origin(transport.get_extra_info("peername"))
        if self.place is self:
            self.waiting.make_room(self._address, patient=False)
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_no_more()
        self._held = b""
        if self.transport is not None:
            # close the connection in the same way as after a failed handshake
            super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if not self._address or (self._proven and not self._held):
            self._parse(data)
            return
        if not self._held:
            self.turns.add(self._address, self._take_turn)
        self._held += data
        self.transport.pause_reading()

    def _take_turn(self) -> None:
        if self.transport.is_closing():
            return
        size = len(self._held) if self._proven else PIECE
        piece, self._held = self._held[:size], self._held[size:]
        if self._held:
            self.turns.add(self._address, self._take_turn)
        elif not self.flow.read_paused:
            self.transport.resume_reading()
        self._parse(piece)

    def _parse(self, data: bytes) -> None:
        self._rest += len(data)
        if self._timer is None and self._whole:
            self._start_timer()
        if not self._whole and self.cycle is not None and self.cycle.response_complete:
            self._discarded += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._rest > HEAD_BYTES:
            self._refuse(431)
        elif self._discarded > _DISCARDED:
            self._end()

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= PIPELINED and not self._proven:
            raise ValueError("the client sent too many requests without waiting for the answers")
        self._whole, self._in_head, self._head, self._discarded = False, True, 0, 0
        super().on_message_begin()
        if self.doors is not None and self.doors.only_downloads(
            self.transport.get_extra_info("ssl_object")
        ):
            self.scope[self.scope_mark] = True  # type: ignore[literal-required]  # a key of ours

    def on_url(self, url: bytes) -> None:
        self._count(len(url), complete=False)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value), complete=True)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._rest, self._in_head = 0, False
        self._wait_no_more()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._rest = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._rest, self._whole = 0, True
        if self.cycle.response_complete:  # the head of the next request gets its own time limit
            self._stop_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._limit_reading()
            if self._status >= 400:
                self._abort_later()
        elif not self.pipeline and self._has_place():
            self._wait(timed=not self._whole)

    def _has_place(self) -> bool:
        """Return whether the connection may stay open to wait for the next request. If too many
        connections already wait, this connection is closed.
        """
        tls = self.place is not self
        if self._proven or self.waiting.make_room(self._address, patient=tls):
            return True
        self.transport.close()
        self._limit_reading()
        return False

    def send_400_response(self, msg: str) -> None:
        """Send the response with the status 400. Uvicorn calls this method when the parser fails,
        or when `_count` makes the parser fail.
        """
        if self._refusal:
            self._refuse(self._refusal)
        else:
            super().send_400_response(msg)
            self._end()

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        started = False
        cycle = receive.__self__
        if not cycle.more_body and 0 < len(cycle.body) <= PIECE:
            scope[ARRIVED] = bytes(cycle.body)

        async def watch(message: Any) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self._status = message["status"]
                if self._status < 400 and not is_open(scope["path"]):
                    self._proven = True
            await send(message)

        try:
            await self._inner(scope, receive, watch)
        except asyncio.CancelledError:  # the server ends, and the request takes too long
            _log.info("cut off a request, because the server stops listening: %s", scope["path"])
            if started:
                self.cycle.disconnected = True  # so that uvicorn reports no error
                self.transport.abort()
                return
            await send({"type": "http.response.start", "status": 503, "headers": _NO_BODY})
            await send({"type": "http.response.body", "body": b""})

    def _count(self, size: int, *, complete: bool) -> None:
        self._head += size
        if complete:
            self._rest = 0
        if self._head > HEAD_BYTES or len(self.headers) >= HEADERS:
            self._refusal = 431
            # this error makes the parser fail, which then calls `send_400_response`
            raise ValueError("the request's header is too large")

    def _refuse(self, status: int) -> None:
        self._wait_no_more()
        self.transport.write(
            STATUS_LINE[status] + b"content-length: 0\r\nconnection: close\r\n\r\n"
        )
        self._end()

    def _end(self) -> None:
        self.transport.pause_reading()
        self.transport.close()
        self._limit_reading()
        self._abort_later()

    def _limit_reading(self) -> None:
        """Let the kernel discard the data that a peer without a token still sends. Otherwise, the
        server itself would have to read and decrypt this data until the peer closes its TLS
        connection.
        """
        if isinstance(self.place, socket.socket) and not self._proven:
            with contextlib.suppress(OSError):  # the connection is already closed
                # the kernel replaces 1 with its minimum
                self.place.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)

    def _abort_later(self) -> None:
        # closing a TLS connection normally would wait for the peer
        self.loop.call_later(_LINGER_S, self.transport.abort)

    def _wait(self, *, timed: bool = True) -> None:
        if not self._proven:
            self.waiting.add(self.place, self._address, self.transport.abort)
        if timed:
            self._start_timer()

    def _wait_no_more(self) -> None:
        self.waiting.remove(self.place)
        self._stop_timer()

    def _start_timer(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(HEAD_S, self._end_wait)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_wait(self) -> None:
        self._timer = None
        if self.transport.is_closing():
            return
        if self._in_head:
            self._refuse(408)
        else:
            self._end()


class BoundedServer(uvicorn.Server):
    """Serves the connections of listeners, within the limits of this module. The caller must handle
    signals.
    """

    def __init__(
        self,
        app: Any,
        tls: ListenerTls | None = None,
        scope_mark: str = "",
        turns: Turns | None = None,
    ) -> None:
        self.waiting = Waiting()
        self._turns = turns or Turns()
        self._handshakes: list[Handshakes] = []
        kept = {
            "waiting": self.waiting,
            "turns": self._turns,
            "scope_mark": scope_mark,
            "doors": tls,
        }
        config = uvicorn.Config(
            app,
            http=type("Http", (BoundedHttp,), kept),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_keep_alive=120,
            # seconds after the server stops listening in which running requests may still finish
            timeout_graceful_shutdown=1,
            backlog=1024,
        )
        super().__init__(config)
        config.load()
        self._context = tls.strict if tls is not None else None

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield

    async def startup(self, sockets: Any = None) -> None:
        """Start the listeners as uvicorn's `startup` does, but perform the TLS handshakes in this
        module, which counts them and limits their duration.
        """
        loop = asyncio.get_running_loop()
        await self.lifespan.startup()

        def make(place: object = None) -> BoundedHttp:
            protocol: Any = self.config.http_protocol_class
            made: BoundedHttp = protocol(
                config=self.config, server_state=self.server_state, app_state={}, _loop=loop
            )
            if place is not None:
                made.place = place
            return made

        self.servers = []
        for each in sockets:
            if self._context is not None:
                self._handshakes.append(
                    Handshakes(each, self.waiting, self._turns, self._context, make)
                )
            else:
                made = await loop.create_server(make, sock=each, backlog=self.config.backlog)
                self.servers.append(made)
        self.started = True

    async def shutdown(self, sockets: Any = None) -> None:
        for each in self._handshakes:
            each.close()
        await super().shutdown(sockets)


def open_port(
    host: str, port: int, family: int, *, wait_s: float = 0.0, reuse_port: bool = False
) -> socket.socket:
    """Listen on a port. If another socket uses the port, try again for `wait_s` seconds. Blocks.
    Raises OSError.
    """
    end = time.monotonic() + wait_s
    while True:
        try:
            return socket.create_server(
                (host, port), family=family, backlog=1024, reuse_port=reuse_port
            )
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() >= end:
                raise
        time.sleep(_PAUSE_S)


def hold_port() -> socket.socket:
    """Reserve a free port: return a socket that is bound to it. While the socket exists, Linux does
    not assign the port to programs that request any free port. A program that sets SO_REUSEADDR can
    still listen on it.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((LOCAL, 0))
    return held

"""Limits the resources that a connection can use before it has shown a token. The limits apply to
the bytes and the time of a request's head (its first line and headers), the time of a TLS
handshake, and the number of connections without a request.

The limits are needed because uvicorn limits neither the size of a header nor the time until it is
complete. Whenever data arrives, httptools copies all earlier parts of an unfinished header again.
So a header of 64 MiB could block the only thread that handles requests for 30 s.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import uvicorn
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from cavvy.api.auth import is_open
from cavvy.api.state_dir import peer_is_us

# maximum bytes of a head; the limits of other programs: Cavvy's client 64 KiB, nginx 32 KiB, h11 64
# KiB
HEAD_BYTES = 64 * 1024
HEADERS = 100  # maximum number of headers; http.client and Apache have the same limit
HEAD_S = 10.0  # maximum seconds for a complete head, and for a TLS handshake
WAITING = 512  # maximum number of connections without a request, per listener
WAITING_EACH = 64  # maximum number of connections without a request, per address
# While there are WAITING connections and the oldest one has waited less than this many seconds, no
# more are accepted: a crowd of nodes that connect at the same time is served one after the other.
# If the oldest ones were cut instead, none of the crowd would get through.
SERVED_S = 2.0
_CROWD_PAUSE_S = 0.02  # pause before such a listener looks again
_ACCEPTED = 100  # maximum number of connections accepted per call
_REST_S = 1.0  # seconds for which the listener pauses when the process has no free file descriptors
_LINGER_S = 1.0  # seconds after its last answer until a connection is aborted
_DISCARDED = 1024 * 1024  # maximum bytes of a body that are read after its answer was sent
_log = logging.getLogger(__name__)


class Waiting:
    """The connections that have not sent a request yet, oldest first. If there are too many, the
    oldest one is closed, because a client normally sends its request at once.
    """

    def __init__(self) -> None:
        self._all: dict[object, tuple[str, Callable[[], None], float]] = {}
        self._each: dict[str, dict[object, None]] = {}

    def add(self, connection: object, address: str, cut: Callable[[], None]) -> None:
        self.remove(connection)
        self._all[connection] = (address, cut, time.monotonic())
        own = self._each.setdefault(address, {})
        own[connection] = None
        if address and len(own) > WAITING_EACH:
            self._cut(next(iter(own)))
        elif len(self._all) > WAITING:
            self._cut(next(iter(self._all)))

    @property
    def crowded(self) -> bool:
        """Whether there are too many, and none of them has waited for long."""
        if len(self._all) < WAITING:
            return False
        _, _, since = next(iter(self._all.values()))
        return time.monotonic() - since < SERVED_S

    def remove(self, connection: object) -> None:
        found = self._all.pop(connection, None)
        if found is not None:
            own = self._each[found[0]]
            del own[connection]
            if not own:
                del self._each[found[0]]

    def _cut(self, connection: object) -> None:
        _, cut, _ = self._all[connection]
        self.remove(connection)
        cut()


class ListenerTls(Protocol):
    """What a listener needs to know of TLS."""

    strict: ssl.SSLContext  # each connection starts with it

    def only_downloads(self, connection: object) -> bool:
        """Whether this TLS connection may only download files by hash."""
        ...


class BoundedHttp(HttpToolsProtocol):
    """uvicorn's HTTP protocol, with limits on the size, number and time of a request's head."""

    waiting: Waiting
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

    def connection_made(self, transport: Any) -> None:
        """Accept the connection, unless it comes from a process of another user."""
        connection = transport.get_extra_info("socket")
        if connection is not None and not peer_is_us(connection):
            transport.abort()
            return
        peer = transport.get_extra_info("peername")
        self._address = str(peer[0]) if isinstance(peer, tuple) and peer else ""
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_no_more()
        if self.transport is not None:
            # close the connection in the same way as after a failed handshake
            super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._rest += len(data)
        if self._timer is None and self._whole:
            self._start_timer()
        super().data_received(data)
        if self._rest > HEAD_BYTES and not self.transport.is_closing():
            self._refuse(431)

    def on_message_begin(self) -> None:
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
        if self.cycle.response_complete:
            self._discarded += len(body)
            if self._discarded > _DISCARDED:
                self._end()
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._rest, self._whole = 0, True
        if self.cycle.response_complete:  # the head of the next request gets its own time limit
            self._stop_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing() and not self.pipeline:
            self._wait(timed=not self._whole)

    def send_400_response(self, msg: str) -> None:
        """Called when the parser fails, or when `_count` makes the parser fail."""
        if self._refusal:
            self._refuse(self._refusal)
        else:
            super().send_400_response(msg)
            self._end()

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        async def watch(message: Any) -> None:
            if message["type"] == "http.response.start" and message["status"] < 400:
                self._proven = self._proven or not is_open(scope["path"])
            await send(message)

        await self._inner(scope, receive, watch)

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
        # closing a TLS connection normally would wait for the peer
        self.loop.call_later(_LINGER_S, self.transport.abort)

    def _wait(self, *, timed: bool = True) -> None:
        if not self._proven:
            self.waiting.add(self, self._address, self.transport.abort)
        if timed:
            self._start_timer()

    def _wait_no_more(self) -> None:
        self.waiting.remove(self)
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


class Handshakes:
    """Accepts the connections of a TLS listener. uvloop's own listener reports a connection only
    after its handshake, but here connections must be counted before it.
    """

    def __init__(
        self,
        listener: socket.socket,
        waiting: Waiting,
        context: ssl.SSLContext,
        make: Callable[[], BoundedHttp],
    ) -> None:
        self._listener, self._waiting, self._context, self._make = listener, waiting, context, make
        self._loop = asyncio.get_running_loop()
        self._tasks: dict[asyncio.Task[None], socket.socket] = {}
        self._open = True
        self._begin()

    def close(self) -> None:
        self._open = False
        self._loop.remove_reader(self._listener.fileno())
        for connection in self._tasks.values():
            _shut(connection)

    def _begin(self) -> None:
        if self._open:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(_ACCEPTED):
            if self._waiting.crowded:
                self._rest(_CROWD_PAUSE_S)
                return
            try:
                connection, peer = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:  # no free file descriptors
                _log.warning("cannot accept connections of nodes: %s", error)
                self._rest(_REST_S)
                return
            connection.setblocking(False)
            task = self._loop.create_task(self._shake(connection))
            self._tasks[task] = connection
            task.add_done_callback(self._tasks.pop)
            self._waiting.add(connection, str(peer[0]), partial(_shut, connection))

    def _rest(self, seconds: float) -> None:
        self._loop.remove_reader(self._listener.fileno())
        self._loop.call_later(seconds, self._begin)

    async def _shake(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(
                self._make, connection, ssl=self._context, ssl_handshake_timeout=HEAD_S
            )
        except OSError:  # this includes SSLError; an unfinished handshake gets no answer
            connection.close()
        finally:
            self._waiting.remove(connection)


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class BoundedServer(uvicorn.Server):
    """Serves listeners, with limits on their connections. The caller must handle signals."""

    def __init__(self, app: Any, tls: ListenerTls | None = None, scope_mark: str = "") -> None:
        self.waiting = Waiting()
        self._handshakes: list[Handshakes] = []
        kept = {
            "waiting": self.waiting,
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
        """Like uvicorn's `startup`, but TLS handshakes are done by this module, so that it can
        count them and limit their time.
        """
        loop = asyncio.get_running_loop()
        await self.lifespan.startup()

        def make() -> BoundedHttp:
            protocol: Any = self.config.http_protocol_class
            made: BoundedHttp = protocol(
                config=self.config, server_state=self.server_state, app_state={}, _loop=loop
            )
            return made

        self.servers = []
        for each in sockets:
            if self._context is not None:
                self._handshakes.append(Handshakes(each, self.waiting, self._context, make))
            else:
                made = await loop.create_server(make, sock=each, backlog=self.config.backlog)
                self.servers.append(made)
        self.started = True

    async def shutdown(self, sockets: Any = None) -> None:
        for each in self._handshakes:
            each.close()
        await super().shutdown(sockets)

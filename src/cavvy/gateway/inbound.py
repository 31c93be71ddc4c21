"""The connections of clients: HTTP/1.1 with keep-alive, one request at a time."""

import asyncio
from time import monotonic
from typing import TYPE_CHECKING, Protocol, cast

from cavvy.gateway.bodies import LAST_CHUNK, Body, make_body
from cavvy.gateway.exchange import Exchange
from cavvy.gateway.heads import (
    NO_LENGTH,
    UNTIL_CLOSE,
    HeadError,
    RequestHead,
    ResponseHead,
)
from cavvy.gateway.other_origins import share, write_permission
from cavvy.gateway.own_answers import AnswerCode, write_answer

if TYPE_CHECKING:
    from cavvy.gateway.door import Door

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_LINGER_S = 2.0  # seconds for a client that still sends a body that is not wanted
_PROBES_S = (0.05, 0.5, 2.0, 10.0)
_FIRST = frozenset(b"!#$%&'*+-.^_`|~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")


class OpenRequest(Protocol):
    """The interface between a connection and the request that the connection reads."""

    head: RequestHead
    held_bytes: int

    def begin(self) -> None:
        """Begin the request after its head has arrived, even if parts of the body are missing."""

    def feed(self, payload: bytes, done: bool) -> bool:
        """Add decoded bytes of the body; return False if the body is larger than permitted."""

    def abort(self) -> None:
        """Abort the request, because the client has disconnected."""


class InboundConnection(asyncio.Protocol):
    __slots__ = (
        "_address",
        "_body",
        "_body_at",
        "_buffer",
        "_chunked",
        "_closing",
        "_door",
        "_expects",
        "_half_closed",
        "_head_at",
        "_idle_at",
        "_lingers",
        "_moved",
        "_moved_at",
        "_paused",
        "_request",
        "_stalled_at",
        "_started",
        "_tunnel",
        "peer",
        "request_id",
        "shares",
        "transport",
    )

    transport: asyncio.Transport

    def __init__(self, door: "Door") -> None:
        self._door = door
        self._request: OpenRequest | None = None
        self._body: Body | None = None  # body of the request, while it is incomplete
        self._buffer = b""
        self._chunked = False  # the response
        self._started = False  # the head of the response is written
        self._closing = False  # after this response
        self._expects = False  # the client waits for "100 Continue"
        self._half_closed = False
        self._lingers = False
        self._tunnel = False
        self._paused = False
        # whether bytes of a response or a tunnel have arrived since the last check
        self._moved = False
        self._moved_at = 0.0  # time of the first check after the last of these bytes
        self._head_at = 0.0  # when the head that is being read began; 0 if none is being read
        self._body_at = 0.0
        self._idle_at = monotonic()
        self._stalled_at = 0.0  # since when the client has read nothing; 0 if it reads
        self.request_id = b""
        self.shares = False  # pages of other origins may read the response
        self._address = b"unknown"  # of the program that is connected
        self.peer = self._address  # the client's address

    # Methods that the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # the transports of uvloop have no common base class
        self.transport = cast(asyncio.Transport, transport)
        peer = self.transport.get_extra_info("peername")
        if peer:
            self.peer = self._address = peer[0].encode()
        if not self._door.enter(self):
            self._closing = True
            self._refuse(503, AnswerCode.CONNECTIONS, "too many connections", retry_s=1)

    def data_received(self, data: bytes) -> None:
        if self._tunnel:
            self._moved = True
            self._pass_on(data)
        elif self._lingers:
            return
        elif self._body is not None:
            self._read_body(data)
            if self._request is None:
                self._pump()
        else:
            self._buffer = self._buffer + data if self._buffer else data
            if self._request is None:
                self._pump()
            elif len(self._buffer) > self._door.limits.head_bytes:
                self._pause()

    def eof_received(self) -> bool:
        if self._lingers or self._request is None:
            return False
        if self._tunnel:
            self._half_closed = True
            self._pass_on(b"")
            return not self._closing  # the replica has also ended its half
        if self._body is not None:  # the rest of the body will not arrive
            return False
        self._half_closed = True
        self._probe(0)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._door.leave(self)
        request, self._request = self._request, None
        self._closing = True
        if request is not None:
            request.abort()

    def pause_writing(self) -> None:
        self._stalled_at = monotonic()
        if isinstance(self._request, Exchange) and self._request.upstream is not None:
            self._request.upstream.transport.pause_reading()

    def resume_writing(self) -> None:
        self._stalled_at = 0.0
        if isinstance(self._request, Exchange) and self._request.upstream is not None:
            self._request.upstream.transport.resume_reading()

    def close_idle(self) -> None:
        """The gateway stops."""
        if self._request is None:
            self.transport.close()

    def refuse_waiting(self) -> None:
        """Refuse the open request if no replica has it, because the gateway stops now."""
        request = self._request
        if isinstance(request, Exchange) and not request.is_taken():
            request.abort()
            text = "the gateway stopped before a replica was free; repeat the request"
            self.answer(503, AnswerCode.STOPPING, text, None)

    def check(self, now: float) -> None:
        """End requests that take too long. The gateway calls this method once a second."""
        limits = self._door.limits
        request = self._request
        if self._stalled_at and now - self._stalled_at > limits.stall_s:
            self._drop()
        elif self._lingers:
            if now - self._idle_at > _LINGER_S:
                self.transport.abort()
        elif request is None:
            if self._head_at:
                if now - self._head_at > limits.head_s:
                    self._refuse(408, AnswerCode.SLOW, "the head of the request took too long")
            elif now - self._idle_at > limits.idle_s:
                self.transport.close()
        elif self._body is not None and not self._paused:
            if now - self._body_at > limits.body_idle_s and not self._expects:
                self._give_up(408, AnswerCode.SLOW, "the body of the request stopped arriving")
        elif isinstance(request, Exchange):
            self._check_answer(request, now)

    def _check_answer(self, request: Exchange, now: float) -> None:
        """End the request if its response does not begin, or if its response or tunnel transfers no
        data for too long."""
        route = request.service.route
        bound_s = route.silence_s
        if not request.responding:
            if request.is_taken() and now - request.started_at > route.response_s:
                self._give_up(504, AnswerCode.SILENT, "the replica took too long to answer")
        elif self._moved or not self._moved_at:
            self._moved, self._moved_at = False, now
        elif bound_s is not None and now - self._moved_at > bound_s and not self._stalled_at:
            self._drop()

    # requests

    def _pump(self) -> None:
        """Read the next request from the buffer whenever no request is open, until the buffer
        contains no further request."""
        while self._buffer and self._request is None and not self._closing:
            data = self._buffer
            end = data.find(b"\r\n\r\n") + 4
            if end < 4 or end > self._door.limits.head_bytes:
                self._wait_for_head(data)
                return
            self._buffer = b""
            self._head_at = 0.0
            try:
                head = self._door.memo.parse_request(data[:end])
            except HeadError as error:
                self._refuse(error.status, AnswerCode.BAD_REQUEST, error.what)
                return
            self._begin(head, data[end:])

    def _wait_for_head(self, data: bytes) -> None:
        limits = self._door.limits
        if data[0] not in _FIRST or data.count(b"\n") > data.count(b"\r\n"):
            self._refuse(400, AnswerCode.BAD_REQUEST, "this is not HTTP/1.1")
        elif len(data) > limits.head_bytes:
            self._refuse(
                431, AnswerCode.BAD_REQUEST, f"the head is larger than {limits.head_bytes} bytes"
            )
        elif not self._head_at:
            self._head_at = monotonic()

    def _begin(self, head: RequestHead, rest: bytes) -> None:
        now = monotonic()
        self.shares = False
        self.request_id = self._door.find_request_id(head)
        self.peer = self._door.find_client(head, self._address)
        self._closing = head.close
        self._started = False
        request = self._door.open_request(self, head, now)
        if request is None:  # refused, and answered
            if head.length == 0 and not self._closing:
                self._buffer = rest
            return
        self._request = request
        self._expects = head.expect
        if head.length == 0:
            self._buffer = rest
        else:
            self._body = make_body(head.length)
            self._body_at = now
            if rest:
                self._read_body(rest)
        if self._request is request:
            request.begin()

    def _read_body(self, data: bytes) -> None:
        body, request = self._body, self._request
        assert body is not None
        assert request is not None
        self._body_at = monotonic()
        try:
            payload = body.feed(data)
        except HeadError as error:
            self._give_up(error.status, AnswerCode.BAD_REQUEST, error.what)
            return
        if body.done:
            self._body = None
            self._buffer = body.rest
        if (payload or body.done) and not request.feed(payload, body.done):
            self._give_up(413, AnswerCode.TOO_LARGE, "the body is larger than permitted")
        elif self._body is not None and request.held_bytes > self._door.limits.hold_bytes:
            self._hold(request)

    def _hold(self, request: OpenRequest) -> None:
        """Pause reading a request's body if no replica has taken the request yet."""
        if not isinstance(request, Exchange) or request.upstream is None:
            self._pause()

    # the response

    def respond(self, head: ResponseHead, payload: bytes, done: bool) -> None:
        request = self._request
        if request is None:
            return
        self._started = self._moved = True
        framing = b""
        self._chunked = False
        if head.length in (NO_LENGTH, UNTIL_CLOSE):
            if request.head.version == 1:
                self._chunked = True
                framing = b"Transfer-Encoding: chunked\r\n"
            else:
                self._closing = True
        if self._body is not None or self._half_closed or self._door.stopping:
            self._closing = True
        if self._closing:
            framing += b"Connection: close\r\n"
        if isinstance(request, Exchange) and request.price:
            framing += request.price
        if self._chunked and (payload or done):
            payload = self._frame(payload, done)
        fields = share(head.fields) if self.shares else head.fields
        self.transport.write(
            b"%bX-Request-Id: %b\r\n%b\r\n%b" % (fields, self.request_id, framing, payload)
        )

    def send(self, payload: bytes, done: bool) -> None:
        if self._request is None:
            return
        self._moved = True
        if self._tunnel:
            if payload:
                self.transport.write(payload)
            if done:
                self._end_half()
        elif self._chunked and not done:
            self.transport.write(b"%x\r\n%b\r\n" % (len(payload), payload))
        elif data := self._frame(payload, done):
            self.transport.write(data)

    @property
    def passes_chunks(self) -> bool:
        return self._chunked

    def pass_chunk(self, data: bytes) -> None:
        if self._request is not None:
            self._moved = True
            self.transport.write(data)

    def _frame(self, payload: bytes, done: bool) -> bytes:
        if not self._chunked:
            return payload
        if not done:
            return b"%x\r\n%b\r\n" % (len(payload), payload)
        return b"%x\r\n%b\r\n0\r\n\r\n" % (len(payload), payload) if payload else LAST_CHUNK

    def send_interim(self, head: ResponseHead) -> None:
        request = self._request
        if head.status != 100 and request is not None and request.head.version == 1:
            self.transport.write(head.fields + b"\r\n")

    def switch(self, head: ResponseHead, payload: bytes) -> None:
        self._tunnel = self._started = self._moved = True
        change = b"Connection: upgrade\r\nUpgrade: %b\r\n\r\n" % head.upgrade
        self.transport.write(head.fields + change + payload)
        early, self._buffer = self._buffer, b""
        if early:
            self._pass_on(early)

    def _end_half(self) -> None:
        """Handle the end of the bytes that the replica sends through the tunnel."""
        self._closing = True
        if self._half_closed or not self.transport.can_write_eof():
            self.transport.close()
        else:
            self.transport.write_eof()

    def _pass_on(self, data: bytes) -> None:
        """Pass bytes of a tunnel to the replica; empty `data` marks the end of the bytes."""
        request = self._request
        if isinstance(request, Exchange) and request.upstream is not None:
            if data:
                request.upstream.transport.write(data)
            elif request.upstream.transport.can_write_eof():
                request.upstream.transport.write_eof()

    def answer(self, status: int, code: AnswerCode, message: str, retry_s: int | None) -> None:
        """Send the gateway's own response to the open request."""
        request = self._request
        if self._body is not None or self._half_closed:
            self._closing = True
        self._write_own(status, code, message, retry_s, request.head if request else None)
        self.end()

    def exchange_request(self, request: OpenRequest | None) -> None:
        """Replace the object that handles the open request."""
        self._request = request

    def reply(self, body: bytes, head: RequestHead) -> None:
        """Send the gateway's own JSON response to a request that was not opened."""
        fields = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"
        self._reply(fields % len(body), b"" if head.method == b"HEAD" else body, head)

    def permit(self, head: RequestHead) -> None:
        """Let pages of other origins send the request for which this preflight asks."""
        self.shares = False  # the permission is written already
        self._reply(write_permission(head), b"", head)

    def redirect(self, fields: bytes, head: RequestHead) -> None:
        """Send the gateway's own redirect, instead of opening the request."""
        self._reply(fields, b"", head)

    def _reply(self, fields: bytes, body: bytes, head: RequestHead) -> None:
        if head.length:
            self._closing = True
        close = b"Connection: close\r\n" if self._closing else b""
        fields = share(fields) if self.shares else fields
        self.transport.write(
            b"%bX-Request-Id: %b\r\n%b\r\n%b" % (fields, self.request_id, close, body)
        )
        self._end_unopened(head)

    def answer_bytes(self, data: bytes) -> None:
        """Send a whole response, with its Content-Length."""
        self.transport.write(share(data) if self.shares else data)
        self.end()

    def cut(self) -> None:
        self._request = None
        self.transport.abort()

    def _drop(self) -> None:
        request, self._request = self._request, None
        if request is not None:
            request.abort()
        self.transport.abort()

    def end(self) -> None:
        self._request = None
        self._idle_at = monotonic()
        if self._body is not None:
            self._linger()
        elif self._closing or self._half_closed or self._tunnel or self._door.stopping:
            self._closing = True
            self.transport.close()
        else:
            if self._paused:
                self._resume()
            if self._buffer:
                self._pump()

    def want_body(self) -> None:
        if self._expects:
            self._expects = False
            self._body_at = monotonic()
            if self._body is not None:
                self.transport.write(_CONTINUE)
        self.resume_body()

    def pause_body(self) -> None:
        self._pause()

    def resume_body(self) -> None:
        if self._paused:
            self._body_at = monotonic()
            self._resume()

    # endings

    def refuse(
        self,
        status: int,
        code: AnswerCode,
        message: str,
        head: RequestHead,
        retry_s: int | None = None,
    ) -> None:
        """Answer a request that was not opened, without reading its body."""
        if head.length:
            self._closing = True
        self._write_own(status, code, message, retry_s, head)
        self._end_unopened(head)

    def _end_unopened(self, head: RequestHead) -> None:
        self._idle_at = monotonic()
        if head.length:
            self._linger()
        elif self._closing:
            self.transport.close()

    def _refuse(
        self, status: int, code: AnswerCode, message: str, retry_s: int | None = None
    ) -> None:
        """Send an error response because the received bytes are not a request. Later bytes are
        ignored.
        """
        self.request_id = self._door.make_request_id()
        self.shares = False
        self._closing = True
        self._write_own(status, code, message, retry_s, None)
        self._linger()

    def _give_up(self, status: int, code: AnswerCode, message: str) -> None:
        """Abort the open request before its response is complete."""
        request, self._request = self._request, None
        started = self._started
        if request is not None:
            request.abort()
        if started:
            self.transport.abort()
            return
        self._closing = True
        self._write_own(status, code, message, None, request.head if request else None)
        self._linger()

    def _write_own(
        self,
        status: int,
        code: AnswerCode,
        message: str,
        retry_s: int | None,
        head: RequestHead | None,
    ) -> None:
        self._started = True
        data = write_answer(
            status,
            code,
            message,
            self.request_id.decode(),
            retry_s=retry_s,
            close=self._closing,
            without_body=head is not None and head.method == b"HEAD",
        )
        self.transport.write(share(data) if self.shares else data)

    def _linger(self) -> None:
        """Close the connection, but continue reading for a while: a reset would destroy the
        response in transit."""
        self._closing = self._lingers = True
        self._body = None
        self._buffer = b""
        self._idle_at = monotonic()
        if self._paused:
            self._resume()
        if self.transport.can_write_eof() and not self._half_closed:
            self.transport.write_eof()
        else:
            self.transport.close()

    def _probe(self, number: int) -> None:
        """Send an interim response to a client that has closed its sending side. The interim
        response shows whether the client can still receive the final response. If the client has
        disconnected, its kernel answers with a reset; a client that closed only its sending side
        ignores the interim response.
        """
        request = self._request
        if not self._half_closed or request is None or self._started or self.transport.is_closing():
            return
        if request.head.version == 0:
            return
        self.transport.write(_CONTINUE)
        if number < len(_PROBES_S):
            asyncio.get_running_loop().call_later(_PROBES_S[number], self._probe, number + 1)

    def _pause(self) -> None:
        if not self._paused and not self.transport.is_closing():
            self._paused = True
            self.transport.pause_reading()

    def _resume(self) -> None:
        self._paused = False
        if not self.transport.is_closing():
            self.transport.resume_reading()

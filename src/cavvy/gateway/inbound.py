"""The first step of a request: the connections of clients. HTTP/1.1 with keep-alive, one request at
a time.
"""

import asyncio
from time import monotonic
from typing import cast

from cavvy.gateway.bodies import LAST_CHUNK, Body, make_body
from cavvy.gateway.config import GatewayLimits
from cavvy.gateway.door import Door
from cavvy.gateway.exchange import Exchange
from cavvy.gateway.heads import (
    NO_LENGTH,
    UNTIL_CLOSE,
    HeadError,
    ResponseHead,
)
from cavvy.gateway.other_origins import share
from cavvy.gateway.own_answers import ANSWERS, Answer, AnswerCode, OwnAnswer, write_answer
from cavvy.gateway.seams import ClientRequest, OpenRequest

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_LINGER_S = 2.0  # seconds for a client that still sends a body that is not wanted
_PROBES_S = (0.05, 0.5, 2.0, 10.0)
_SLOW_HEAD = "the head of the request took too long"
_SLOW_BODY = "the body of the request stopped arriving"
_SILENT = "the replica took too long to answer"
_FIRST = frozenset(b"!#$%&'*+-.^_`|~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")


class ClientConnections:
    """All open connections of clients."""

    def __init__(self, limits: GatewayLimits) -> None:
        self.limits = limits
        self.stopping = False
        self._open: set[InboundConnection] = set()

    def __len__(self) -> int:
        return len(self._open)

    def enter(self, connection: "InboundConnection") -> bool:
        """Register a connection; return False if the gateway has too many connections."""
        self._open.add(connection)
        return len(self._open) <= self.limits.connections

    def leave(self, connection: "InboundConnection") -> None:
        self._open.discard(connection)

    def check(self, now: float) -> None:
        """End requests that take too long. The gateway calls this method once a second."""
        for connection in tuple(self._open):
            connection.check(now)

    def close_idle(self) -> None:
        """Close idle connections, because the gateway stops. A connection with an open request
        closes after the response.
        """
        self.stopping = True
        for connection in tuple(self._open):
            connection.close_idle()

    def refuse_waiting(self) -> None:
        """Refuse the requests that wait for a replica, because the gateway stops now. Deferred
        calls wait for the next gateway.
        """
        for connection in tuple(self._open):
            connection.refuse_waiting()


class InboundConnection(asyncio.Protocol):
    __slots__ = (
        "_address",
        "_asked",
        "_body",
        "_body_at",
        "_buffer",
        "_chunked",
        "_closing",
        "_connections",
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
        "transport",
    )

    transport: asyncio.Transport

    def __init__(self, door: Door, connections: ClientConnections) -> None:
        self._door = door
        self._connections = connections
        self._asked: ClientRequest | None = None  # the last request whose head was valid
        self._request: OpenRequest | None = None  # while it is open
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
        self._address = b"unknown"  # of the program that is connected

    # Methods that the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # the transports of uvloop have no common base class
        self.transport = cast(asyncio.Transport, transport)
        peer = self.transport.get_extra_info("peername")
        if peer:
            self._address = peer[0].encode()
        if not self._connections.enter(self):
            self._closing = True
            self._refuse(OwnAnswer(503, AnswerCode.CONNECTIONS, "too many connections", 1))

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
            elif len(self._buffer) > self._connections.limits.head_bytes:
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
        self._connections.leave(self)
        request, self._request = self._request, None
        self._closing = True
        if request is not None:
            request.abort()

    def pause_writing(self) -> None:
        self._stalled_at = monotonic()
        if isinstance(self._request, Exchange) and self._request.replica is not None:
            self._request.replica.pause_reading()

    def resume_writing(self) -> None:
        self._stalled_at = 0.0
        if isinstance(self._request, Exchange) and self._request.replica is not None:
            self._request.replica.resume_reading()

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
            self.answer(OwnAnswer(503, AnswerCode.STOPPING, text))

    def check(self, now: float) -> None:
        limits = self._connections.limits
        request = self._request
        if self._stalled_at and now - self._stalled_at > limits.stall_s:
            self._drop()
        elif self._lingers:
            if now - self._idle_at > _LINGER_S:
                self.transport.abort()
        elif request is None:
            if self._head_at:
                if now - self._head_at > limits.head_s:
                    self._refuse(OwnAnswer(408, AnswerCode.SLOW, _SLOW_HEAD))
            elif now - self._idle_at > limits.idle_s:
                self.transport.close()
        elif self._body is not None and not self._paused:
            if now - self._body_at > limits.body_idle_s and not self._expects:
                self._give_up(OwnAnswer(408, AnswerCode.SLOW, _SLOW_BODY))
        elif isinstance(request, Exchange):
            self._check_answer(request, now)

    def _check_answer(self, request: Exchange, now: float) -> None:
        """End the request if its response does not begin, or if its response or tunnel transfers no
        data for too long."""
        route = request.entry.route
        bound_s = route.silence_s
        if not request.responding:
            if request.is_taken() and now - request.started_at > route.response_s:
                self._give_up(OwnAnswer(504, AnswerCode.SILENT, _SILENT))
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
            if end < 4 or end > self._connections.limits.head_bytes:
                self._wait_for_head(data)
                return
            self._buffer = b""
            self._head_at = 0.0
            self._begin(data[:end], data[end:])

    def _wait_for_head(self, data: bytes) -> None:
        limits = self._connections.limits
        if data[0] not in _FIRST or data.count(b"\n") > data.count(b"\r\n"):
            self._refuse(OwnAnswer(400, AnswerCode.BAD_REQUEST, "this is not HTTP/1.1"))
        elif len(data) > limits.head_bytes:
            text = f"the head is larger than {limits.head_bytes} bytes"
            self._refuse(OwnAnswer(431, AnswerCode.BAD_REQUEST, text))
        elif not self._head_at:
            self._head_at = monotonic()

    def _begin(self, data: bytes, rest: bytes) -> None:
        """Take the request with this head through the steps of the gateway. `rest` follows the
        head.
        """
        try:
            head = self._door.memo.parse_request(data)
        except HeadError as error:
            self._refuse(OwnAnswer(error.status, AnswerCode.BAD_REQUEST, error.what))
            return
        now = monotonic()
        asked = self._asked = ClientRequest(self, head, now, self._address)
        self._closing = head.close
        self._started = False
        request = self._door.open_request(asked)
        if isinstance(request, ANSWERS):
            self._answer_unopened(request, asked)
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
            self._give_up(OwnAnswer(error.status, AnswerCode.BAD_REQUEST, error.what))
            return
        if body.done:
            self._body = None
            self._buffer = body.rest
        if (payload or body.done) and (found := request.feed(payload, body.done)):
            if isinstance(found, ANSWERS):
                self._give_up(found)
                return
            self._request = request = found
            request.begin()
        if self._body is not None and request.held_bytes > self._connections.limits.hold_bytes:
            self._hold(request)

    def _hold(self, request: OpenRequest) -> None:
        """Pause reading a request's body if no replica has taken the request yet."""
        if not isinstance(request, Exchange) or request.replica is None:
            self._pause()

    # the response

    def respond(self, head: ResponseHead, payload: bytes, done: bool, more: bytes = b"") -> None:
        asked = self._asked
        if self._request is None or asked is None:
            return
        self._started = self._moved = True
        framing = b""
        self._chunked = False
        if head.length in (NO_LENGTH, UNTIL_CLOSE):
            if asked.head.version == 1:
                self._chunked = True
                framing = b"Transfer-Encoding: chunked\r\n"
            else:
                self._closing = True
        if self._body is not None or self._half_closed or self._connections.stopping:
            self._closing = True
        if self._closing:
            framing += b"Connection: close\r\n"
        if self._chunked and (payload or done):
            payload = self._frame(payload, done)
        fields = share(head.fields) if asked.shares else head.fields
        self.transport.write(
            b"%bX-Request-Id: %b\r\n%b%b\r\n%b" % (fields, asked.id, framing, more, payload)
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
        asked = self._asked
        if head.status != 100 and self._request is not None and asked and asked.head.version:
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
        if isinstance(request, Exchange) and request.replica is not None:
            if data:
                request.replica.write(data)
            elif request.replica.can_write_eof():
                request.replica.write_eof()

    def answer(self, answer: OwnAnswer) -> None:
        """Send the gateway's own response to the open request."""
        if self._body is not None or self._half_closed:
            self._closing = True
        self._write_own(answer)
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
        elif self._closing or self._half_closed or self._tunnel or self._connections.stopping:
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

    def _answer_unopened(self, answer: Answer, asked: ClientRequest) -> None:
        """Answer a request that was not opened, without reading its body."""
        if asked.head.length:
            self._closing = True
        self._write_own(answer)
        self._idle_at = monotonic()
        if asked.head.length:
            self._linger()
        elif self._closing:
            self.transport.close()

    def _refuse(self, answer: OwnAnswer) -> None:
        """Send an error response because the received bytes are not a request. Later bytes are
        ignored.
        """
        self._asked = None
        self._closing = True
        self._write_own(answer)
        self._linger()

    def _give_up(self, answer: Answer) -> None:
        """Abort the open request before its response is complete."""
        request, self._request = self._request, None
        started = self._started
        if request is not None:
            request.abort()
        if started:
            self.transport.abort()
            return
        self._closing = True
        self._write_own(answer)
        self._linger()

    def _write_own(self, answer: Answer) -> None:
        self._started = True
        asked = self._asked
        request_id = self._door.make_request_id() if asked is None else asked.id
        without_body = asked is not None and asked.head.method == b"HEAD"
        if isinstance(answer, OwnAnswer):
            data = write_answer(
                answer, request_id.decode(), close=self._closing, without_body=without_body
            )
        else:
            data = b"%bX-Request-Id: %b\r\n%b\r\n%b" % (
                answer.fields,
                request_id,
                b"Connection: close\r\n" if self._closing else b"",
                b"" if without_body else answer.body,
            )
        self.transport.write(share(data) if asked is not None and asked.shares else data)

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
        if not self._half_closed or self._request is None or self._started:
            return
        if self.transport.is_closing() or self._asked is None or self._asked.head.version == 0:
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

"""The first step of a request: the connections of clients. HTTP/1.1 with keep-alive, one request at
a time.
"""

import asyncio
from time import monotonic
from typing import cast

from cavvy.capabilities.serving.gateway.bodies import Body, make_body
from cavvy.capabilities.serving.gateway.config import GatewayLimits
from cavvy.capabilities.serving.gateway.door import Door
from cavvy.capabilities.serving.gateway.exchange import Exchange
from cavvy.capabilities.serving.gateway.heads import HeadError
from cavvy.capabilities.serving.gateway.own_answers import (
    ANSWERS,
    SILENT,
    Answer,
    AnswerCode,
    OwnAnswer,
)
from cavvy.capabilities.serving.gateway.responses import ClientResponse
from cavvy.capabilities.serving.gateway.seams import ClientRequest, OpenRequest

_LINGER_S = 2.0  # seconds for a client that still sends a body that is not wanted
_PROBES_S = (0.05, 0.5, 2.0, 10.0)
_SLOW_HEAD = "the head of the request took too long"
_SLOW_BODY = "the body of the request stopped arriving"
_FIRST = frozenset(b"!#$%&'*+-.^_`|~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")


class ClientConnections:
    """The open connections of clients."""

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
        "_body",
        "_buffer",
        "_connections",
        "_door",
        "_head_at",
        "_idle_at",
        "_lingers",
        "_moved_at",
        "_request",
        "_stalled_at",
        "response",
        "transport",
    )

    transport: asyncio.Transport
    response: ClientResponse

    def __init__(self, door: Door, connections: ClientConnections) -> None:
        self._door = door
        self._connections = connections
        self._request: OpenRequest | None = None  # while it is open
        self._body: Body | None = None  # body of the request, while it is incomplete
        self._buffer = b""
        self._lingers = False
        self._moved_at = 0.0  # time of the first check after bytes of a response or a tunnel
        self._head_at = 0.0  # when the head that is being read began; 0 if none is being read
        self._idle_at = monotonic()
        self._stalled_at = 0.0  # since when the client has read nothing; 0 if it reads
        self._address = b"unknown"  # of the program that is connected

    # Methods that the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # the transports of uvloop have no common base class
        self.transport = cast(asyncio.Transport, transport)
        self.response = ClientResponse(self.transport, self._end, self._pass_early)
        self.response.stopping = self._connections.stopping
        peer = self.transport.get_extra_info("peername")
        if peer:
            self._address = peer[0].encode()
        if not self._connections.enter(self):
            self.response.closing = True
            self._refuse(OwnAnswer(503, AnswerCode.CONNECTIONS, "too many connections", 1))

    def data_received(self, data: bytes) -> None:
        response = self.response
        if response.tunnel:
            response.moved = True
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
                response.pause_body()

    def eof_received(self) -> bool:
        if self._lingers or self._request is None:
            return False
        if self.response.tunnel:
            self.response.half_closed = True
            self._pass_on(b"")
            return not self.response.closing  # the replica has also ended its half
        if self._body is not None:  # the rest of the body will not arrive
            return False
        self.response.half_closed = True
        self._probe(0)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.leave(self)
        request, response = self._take(), self.response
        response.closing = True
        if request is not None:
            request.abort()
        # reference counts free what forms no cycle
        response.request, response.end, response.pass_early = None, _do_nothing, _do_nothing

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
        self.response.stopping = True
        if self._request is None:
            self.transport.close()

    def refuse_waiting(self) -> None:
        """Refuse the open request if no replica has it, because the gateway stops now."""
        request = self._request
        if self.response.open and isinstance(request, Exchange) and not request.is_taken():
            request.abort()
            text = "the gateway stopped before a replica was free; repeat the request"
            self.response.answer(OwnAnswer(503, AnswerCode.STOPPING, text))

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
        elif self._body is not None and not self.response.paused:
            if now - self.response.body_at > limits.body_idle_s and not self.response.expects:
                self._give_up(OwnAnswer(408, AnswerCode.SLOW, _SLOW_BODY))
        elif isinstance(request, Exchange):
            self._check_answer(request, now)

    def _check_answer(self, request: Exchange, now: float) -> None:
        """End the request if its response does not begin, or if its response or tunnel transfers no
        data for too long."""
        route = request.entry.route
        bound_s = route.silence_s
        if not request.responding:
            late = request.is_taken() and now - request.started_at > route.response_s
            if late and not (request.guard is not None and request.guard.silence()):
                self._give_up(SILENT)
        elif self.response.moved or not self._moved_at:
            self.response.moved, self._moved_at = False, now
        elif bound_s is not None and now - self._moved_at > bound_s and not self._stalled_at:
            self._drop()

    # requests

    def _pump(self) -> None:
        """Read the next request from the buffer whenever no request is open, until the buffer
        contains no further request."""
        response = self.response
        while self._buffer and self._request is None and not response.closing:
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
        now, response = monotonic(), self.response
        request = response.request = ClientRequest(response, head, now, self._address)
        response.closing = head.close
        response.started = False
        opened = self._door.open_request(request)
        if isinstance(opened, ANSWERS):
            self._answer_unopened(opened, request)
            if head.length == 0 and not response.closing:
                self._buffer = rest
            return
        self._request, response.open = opened, True
        response.expects = head.expect
        if head.length == 0:
            self._buffer = rest
        else:
            self._body, response.reads_body = make_body(head.length), True
            response.body_at = now
            if rest:
                self._read_body(rest)
        if self._request is opened:
            opened.begin()

    def _read_body(self, data: bytes) -> None:
        body, request = self._body, self._request
        assert body is not None
        assert request is not None
        self.response.body_at = monotonic()
        try:
            payload = body.feed(data)
        except HeadError as error:
            self._give_up(OwnAnswer(error.status, AnswerCode.BAD_REQUEST, error.what))
            return
        if body.done:
            self._body, self.response.reads_body = None, False
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
            self.response.pause_body()

    # tunnels

    def _pass_early(self) -> None:
        early, self._buffer = self._buffer, b""
        if early:
            self._pass_on(early)

    def _pass_on(self, data: bytes) -> None:
        """Pass bytes of a tunnel to the replica; empty `data` marks the end of the bytes."""
        request = self._request
        if isinstance(request, Exchange) and request.replica is not None:
            if data:
                request.replica.write(data)
            elif request.replica.can_write_eof():
                request.replica.write_eof()

    # endings

    def _take(self) -> OpenRequest | None:
        """Return the open request, which is no longer open."""
        request = self._request if self.response.open else None
        self._request, self.response.open = None, False
        return request

    def _drop(self) -> None:
        request = self._take()
        if request is not None:
            request.abort()
        self.transport.abort()

    def _end(self) -> None:
        response = self.response
        self._request, response.open = None, False
        self._idle_at = monotonic()
        if self._body is not None:
            self._linger()
        elif response.closing or response.half_closed or response.tunnel or response.stopping:
            response.closing = True
            self.transport.close()
        else:
            if response.paused:
                response.resume()
            if self._buffer:
                self._pump()

    def _answer_unopened(self, answer: Answer, request: ClientRequest) -> None:
        """Answer a request that was not opened, without reading its body."""
        if request.head.length:
            self.response.closing = True
        self.response.write(answer)
        self._idle_at = monotonic()
        if request.head.length:
            self._linger()
        elif self.response.closing:
            self.transport.close()

    def _refuse(self, answer: OwnAnswer) -> None:
        """Send an error response because the received bytes are not a request. Later bytes are
        ignored.
        """
        self.response.request = None
        self.response.closing = True
        self.response.write(answer, self._door.make_request_id())
        self._linger()

    def _give_up(self, answer: Answer) -> None:
        """Abort the open request before its response is complete."""
        request, started = self._take(), self.response.started
        if request is not None:
            request.abort()
        if started:
            self.transport.abort()
            return
        self.response.closing = True
        self.response.write(answer)
        self._linger()

    def _linger(self) -> None:
        """Close the connection, but continue reading for a while: a reset would destroy the
        response in transit."""
        self.response.closing = self._lingers = True
        self._body, self.response.reads_body = None, False
        self._buffer = b""
        self._idle_at = monotonic()
        if self.response.paused:
            self.response.resume()
        if self.transport.can_write_eof() and not self.response.half_closed:
            self.transport.write_eof()
        else:
            self.transport.close()

    def _probe(self, number: int) -> None:
        """Send an interim response to a client that has closed its sending side. The interim
        response shows whether the client can still receive the final response. If the client has
        disconnected, its kernel answers with a reset; a client that closed only its sending side
        ignores the interim response.
        """
        response, request = self.response, self.response.request
        if not response.half_closed or self._request is None or response.started:
            return
        if self.transport.is_closing() or request is None or request.head.version == 0:
            return
        response.send_continue()
        if number < len(_PROBES_S):
            asyncio.get_running_loop().call_later(_PROBES_S[number], self._probe, number + 1)


def _do_nothing() -> None: ...

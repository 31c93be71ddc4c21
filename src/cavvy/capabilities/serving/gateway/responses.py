"""The last step of a response: writes it to the connection of the client."""

from asyncio import Transport
from collections.abc import Callable
from time import monotonic

from cavvy.capabilities.serving.gateway.bodies import LAST_CHUNK
from cavvy.capabilities.serving.gateway.heads import NO_LENGTH, UNTIL_CLOSE, ResponseHead
from cavvy.capabilities.serving.gateway.other_origins import share
from cavvy.capabilities.serving.gateway.own_answers import (
    ANTHROPIC_PATH,
    Answer,
    OwnAnswer,
    write_answer,
)
from cavvy.capabilities.serving.gateway.seams import ClientRequest

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class ClientResponse:
    """The receiver of the responses on a client's connection, one at a time. The connection, which
    reads the requests, keeps these values true. `end` tells it that the request has ended, and
    `pass_early` that bytes which arrived early are for the replica.
    """

    __slots__ = (
        "_chunked",
        "body_at",
        "closing",
        "end",
        "expects",
        "half_closed",
        "moved",
        "open",
        "pass_early",
        "paused",
        "reads_body",
        "request",
        "started",
        "stopping",
        "transport",
        "tunnel",
    )

    def __init__(
        self, transport: Transport, end: Callable[[], None], pass_early: Callable[[], None]
    ) -> None:
        self.transport = transport
        self.end = end
        self.pass_early = pass_early
        # the last request, or None if its head was not valid
        self.request: ClientRequest | None = None
        self.open = False  # the request is open
        self.reads_body = False  # the body of the request is incomplete
        self.body_at = 0.0  # when bytes of the body arrived, or were wanted again
        self.expects = False  # the client waits for "100 Continue"
        self.paused = False  # the connection reads nothing
        self.half_closed = False  # by the client
        self.stopping = False  # the gateway stops
        self.closing = False  # after this response
        self.started = False  # the head of the response is written
        self.moved = False  # bytes of the response or of a tunnel have arrived since the last check
        self.tunnel = False
        self._chunked = False

    def respond(self, head: ResponseHead, payload: bytes, done: bool, more: bytes = b"") -> None:
        request = self.request
        if request is None or not self.open:
            return
        self.started = self.moved = True
        framing = more
        self._chunked = False
        if head.length in (NO_LENGTH, UNTIL_CLOSE):
            if request.head.version == 1:
                self._chunked = True
                framing += b"Transfer-Encoding: chunked\r\n"
            else:
                self.closing = True
        if self.reads_body or self.half_closed or self.stopping:
            self.closing = True
        if self.closing:
            framing += b"Connection: close\r\n"
        if self._chunked and (payload or done):
            payload = self._frame(payload, done)
        fields = share(head.fields) if request.shares else head.fields
        self.transport.write(
            b"%bX-Request-Id: %b\r\n%b\r\n%b" % (fields, request.id, framing, payload)
        )

    def send(self, payload: bytes, done: bool) -> None:
        if not self.open:
            return
        self.moved = True
        if self.tunnel:
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
        if self.open:
            self.moved = True
            self.transport.write(data)

    def _frame(self, payload: bytes, done: bool) -> bytes:
        if not self._chunked:
            return payload
        if not done:
            return b"%x\r\n%b\r\n" % (len(payload), payload)
        return b"%x\r\n%b\r\n0\r\n\r\n" % (len(payload), payload) if payload else LAST_CHUNK

    def send_interim(self, head: ResponseHead) -> None:
        request = self.request
        if head.status != 100 and self.open and request is not None and request.head.version == 1:
            self.transport.write(head.fields + b"\r\n")

    def send_continue(self) -> None:
        self.transport.write(_CONTINUE)

    def switch(self, head: ResponseHead, payload: bytes) -> None:
        self.tunnel = self.started = self.moved = True
        change = b"Connection: upgrade\r\nUpgrade: %b\r\n\r\n" % head.upgrade
        self.transport.write(head.fields + change + payload)
        self.pass_early()

    def _end_half(self) -> None:
        """Handle the end of the bytes that the replica sends through the tunnel."""
        self.closing = True
        if self.half_closed or not self.transport.can_write_eof():
            self.transport.close()
        else:
            self.transport.write_eof()

    def answer(self, answer: OwnAnswer) -> None:
        if self.reads_body or self.half_closed:
            self.closing = True
        self.write(answer)
        self.end()

    def write(self, answer: Answer, request_id: bytes = b"") -> None:
        """Write the gateway's own response. `request_id` is the ID of a request whose head was not
        valid.
        """
        self.started = True
        request = self.request
        without_body = shares = anthropic = False
        if request is not None:
            request_id, shares = request.id, request.shares
            anthropic = ANTHROPIC_PATH in request.head.target
            without_body = request.head.method == b"HEAD"
        if isinstance(answer, OwnAnswer):
            data = write_answer(
                answer,
                request_id.decode(),
                close=self.closing,
                without_body=without_body,
                anthropic=anthropic,
            )
        else:
            data = b"%bX-Request-Id: %b\r\n%b\r\n%b" % (
                answer.fields,
                request_id,
                b"Connection: close\r\n" if self.closing else b"",
                b"" if without_body else answer.body,
            )
        self.transport.write(share(data) if shares else data)

    def cut(self) -> None:
        self.open = False
        self.transport.abort()

    # the body of the request

    def want_body(self) -> None:
        if self.expects:
            self.expects = False
            self.body_at = monotonic()
            if self.reads_body:
                self.send_continue()
        self.resume_body()

    def pause_body(self) -> None:
        if not self.paused and not self.transport.is_closing():
            self.paused = True
            self.transport.pause_reading()

    def resume_body(self) -> None:
        if self.paused:
            self.body_at = monotonic()
            self.resume()

    def resume(self) -> None:
        self.paused = False
        if not self.transport.is_closing():
            self.transport.resume_reading()

"""`Prefer: respond-async`: the client receives 202 immediately, and fetches the response later from
a URL.

Deferred calls wait in the same queue as all other requests to the service. A call that a replica
had received when the gateway ended is repeated if it is idempotent; otherwise its result is 502.

`BackgroundWork` runs work for which no request waits, also for batches.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import TypeVar

from cavvy.capabilities.serving.gateway.call_store import (
    CallStore,
    KnownCall,
    StoredCall,
    StoredResult,
)
from cavvy.capabilities.serving.gateway.config import GatewayLimits
from cavvy.capabilities.serving.gateway.exchange import Exchange
from cavvy.capabilities.serving.gateway.heads import ResponseHead, parse_request
from cavvy.capabilities.serving.gateway.own_answers import (
    OVERSIZED,
    SILENT,
    AnswerCode,
    OwnAnswer,
    write_answer,
)
from cavvy.capabilities.serving.gateway.routing import strip_prefix
from cavvy.capabilities.serving.gateway.seams import ClientRequest
from cavvy.capabilities.serving.gateway.service_queue import ServiceQueue

_STALLED = "the replica sent nothing for too long"
_TOO_LARGE = "the response is too large to be stored"
RESULTS = b"/.cavvy/results/"
# of the fields of a stored result that each response with the result gets anew
_ANEW = (b"content-length:", b"x-request-id:")


class DeferredRequest:
    """Reads the body of a client's call that will be deferred."""

    held_bytes = 0  # the body is not held back: its size has a separate limit

    def __init__(
        self, calls: "DeferredCalls", request: ClientRequest, service: ServiceQueue, about: bytes
    ) -> None:
        self.request = request
        self.service = service
        self.about = about  # fields about the client
        self.gone = False
        self._calls = calls
        self._pieces: list[bytes] = []
        self._size = 0
        self._begun = False
        self._done = request.head.length == 0

    def begin(self) -> None:
        self._begun = True
        if self._done:
            self._accept()
        else:
            self.request.sink.want_body()

    def feed(self, payload: bytes, done: bool) -> OwnAnswer | None:
        self._pieces.append(payload)
        self._size += len(payload)
        if self._size > self.service.route.deferred_bytes:
            return OVERSIZED
        self._done = done
        if done and self._begun:
            self._accept()
        return None

    def abort(self) -> None:
        self.gone = True

    def _accept(self) -> None:
        self._calls.work.spawn(self._calls.accept(self, b"".join(self._pieces)))


class ResultRequest:
    """A client's request for the result of a deferred call."""

    held_bytes = 0

    def __init__(
        self, calls: "DeferredCalls", request: ClientRequest, service: ServiceQueue, call_id: str
    ) -> None:
        self.request = request
        self.service = service
        self.call_id = call_id
        self.gone = False
        self._calls = calls

    def begin(self) -> None:
        self._calls.work.spawn(self._calls.show(self))

    def feed(self, payload: bytes, done: bool) -> OwnAnswer:
        return OVERSIZED  # this kind of request has no body

    def abort(self) -> None:
        self.gone = True


class DeferredSink:
    """Collects the response of a call for which no client waits. `ended` gets the response, and
    `sent` is called when a replica is about to receive the request. `own` is the gateway's own
    response, if no replica gave one.
    """

    passes_chunks = False

    def __init__(
        self,
        call_id: str,
        most_bytes: int,
        ended: "Callable[[DeferredSink, StoredResult], None]",
        sent: Callable[[str], None] = lambda call_id: None,
    ) -> None:
        self.call_id = call_id
        self.own: OwnAnswer | None = None
        self._ended = ended
        self._sent = sent
        self._most_bytes = most_bytes
        self._head: ResponseHead | None = None
        self._pieces: list[bytes] = []
        self._size = 0
        self._checked_size = -1  # the size at the last check
        self._moved_at = 0.0  # time of the first check at which the size was this one
        self.exchange: Exchange | None = None

    def check(self, now: float) -> None:
        """End the call if its response does not begin in time, or if no data of the response
        arrives for too long.
        """
        exchange = self.exchange
        if exchange is None or not exchange.is_taken():
            return
        route = exchange.entry.route
        if not exchange.responding:
            if now - exchange.started_at > route.response_s:
                self._give_up(SILENT)
        elif self._size != self._checked_size:
            self._checked_size, self._moved_at = self._size, now
        elif route.silence_s is not None and now - self._moved_at > route.silence_s:
            self._give_up(OwnAnswer(504, AnswerCode.SILENT, _STALLED))

    def respond(self, head: ResponseHead, payload: bytes, done: bool, more: bytes = b"") -> None:
        self._head = head
        self.send(payload, done)

    def send(self, payload: bytes, done: bool) -> None:
        self._pieces.append(payload)
        self._size += len(payload)
        if self._size > self._most_bytes:
            self._pieces.clear()
            self._give_up(OwnAnswer(502, AnswerCode.TOO_LARGE, _TOO_LARGE))
        elif done and self._head is not None and self.exchange is not None:
            start, *lines = self._head.fields.split(b"\r\n")[:-1]
            self._finish(start, lines, b"".join(self._pieces))

    def pass_chunk(self, data: bytes) -> None: ...

    def send_interim(self, head: ResponseHead) -> None:
        """Ignore an interim response, because no client is connected that could read the
        response."""

    def switch(self, head: ResponseHead, payload: bytes) -> None:
        self.cut()

    def answer(self, answer: OwnAnswer) -> None:
        """Take the gateway's own response as the result."""
        self.own = answer
        head, _, body = write_answer(answer, self.call_id).partition(b"\r\n\r\n")
        start, *lines = head.split(b"\r\n")
        self._finish(start, lines, body)

    def cut(self) -> None:
        text = "the replica ended in the middle of its response"
        self.answer(OwnAnswer(502, AnswerCode.LOST, text))

    def end(self) -> None: ...

    def want_body(self) -> None:
        """Record that a replica is about to receive the request."""
        self._sent(self.call_id)

    def pause_body(self) -> None: ...

    def resume_body(self) -> None: ...

    def _give_up(self, answer: OwnAnswer) -> None:
        """Abort the call's request, and store the gateway's own response as the result."""
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            exchange.abort()
            self.answer(answer)

    def _finish(self, start: bytes, lines: list[bytes], body: bytes) -> None:
        self.exchange = None
        kept = tuple(line for line in lines if not line.lower().startswith(_ANEW))
        self._ended(self, StoredResult(status_line=start, lines=kept, body=body))


class DeferredCalls:
    """All deferred calls of the gateway."""

    def __init__(self, store: CallStore, limits: GatewayLimits) -> None:
        self.store = store
        self._limits = limits
        self.sinks: set[DeferredSink] = set()  # of the calls that wait or run
        self._known = store.list_known()
        self.work = BackgroundWork("deferred-calls", "a deferred call failed")

    async def accept(self, request: DeferredRequest, body: bytes) -> None:
        """Store the call, answer 202 and queue the call for a replica."""
        service, sink, key_id = request.service, request.request.sink, request.request.key_id
        route = service.route
        kept = sum(1 for known in self._known.values() if known.service == route.name)
        if kept >= route.deferred_max:
            service.refuse()
            if not request.gone:
                text = f"the service already has {kept} stored deferred calls"
                sink.answer(OwnAnswer(429, AnswerCode.TOO_MANY, text, service.retry_s()))
            return
        call_id = secrets.token_hex(16)
        known = KnownCall(
            service=route.name,
            key_id=key_id,
            expires_at=time.time() + route.deferred_ttl_s,
            done=False,
        )
        call = StoredCall(
            id=call_id,
            service=route.name,
            key_id=key_id,
            head=_write_head(request, len(body)),
            body=body,
        )
        self._known[call_id] = known
        await self.work.call(lambda: self.store.put(call, known))
        if not request.gone:
            location = f"{route.prefix}{RESULTS.decode()}{call_id}"
            text = f"the response will be at {location}"
            sink.answer(OwnAnswer(202, AnswerCode.ACCEPTED, text, service.retry_s(), location))
        self._start(service, call)

    def resume(self, find: Callable[[str], ServiceQueue | None]) -> None:
        """Continue the deferred calls that an earlier gateway process stored."""
        for call, sent in self.store.list_open():
            service = find(call.service)
            head = parse_request(call.head, self._limits)
            if service is None or (sent and not head.idempotent):
                sink = self._make_sink(call.id, 0)
                text = (
                    "the gateway or the service ended while the call ran, and the request is not "
                    "idempotent; send an Idempotency-Key with requests that may be repeated"
                )
                sink.answer(OwnAnswer(502, AnswerCode.INTERRUPTED, text))
            else:
                self._start(service, call)

    def _start(self, service: ServiceQueue, call: StoredCall) -> None:
        head = parse_request(call.head, self._limits)
        sink = self._make_sink(call.id, service.route.deferred_bytes)
        out_head = call.head[:-2] + b"X-Request-Id: %b\r\n\r\n" % call.id.encode()
        exchange = Exchange(sink, service.entry, head, out_head, monotonic())
        exchange.wait_s = service.route.deferred_ttl_s
        exchange.tells = True
        exchange.key_id = call.key_id
        route, below = service.route, head.target
        if not route.strip_prefix:
            below = strip_prefix(below, route.prefix.encode())
        service.meters.open(exchange, below)
        sink.exchange = exchange
        self.sinks.add(sink)
        exchange.feed(call.body, True)
        exchange.begin()

    def _make_sink(self, call_id: str, most_bytes: int) -> DeferredSink:
        return DeferredSink(call_id, most_bytes, self._end, self.store.mark_sent)

    def _end(self, sink: DeferredSink, result: StoredResult) -> None:
        self.sinks.discard(sink)
        self.work.spawn(self.finish(sink.call_id, result))

    async def finish(self, call_id: str, result: StoredResult) -> None:
        await self.work.call(lambda: self.store.put_result(call_id, result))
        known = self._known.get(call_id)
        if known is not None:
            known.done = True

    async def show(self, request: ResultRequest) -> None:
        """Answer a client that requests a result."""
        sink, service, call_id = request.request.sink, request.service, request.call_id
        known = self._known.get(call_id)
        owner = (service.route.name, request.request.key_id)
        mine = known is not None and (known.service, known.key_id) == owner
        result = await self.work.call(lambda: self.store.get_result(call_id)) if mine else None
        if request.gone:
            return
        if known is None or not mine:
            sink.answer(OwnAnswer(404, AnswerCode.NO_RESULT, "no such result is stored"))
        elif result is None:
            retry_s = min(service.retry_s() or 1, 60)
            text = "the call has no result yet"
            sink.answer(OwnAnswer(202, AnswerCode.ACCEPTED, text, retry_s))
        else:
            without_body = request.request.head.method == b"HEAD"
            sink.respond(_read_head(result), b"" if without_body else result.body, True)
            sink.end()

    def check(self, now: float) -> None:
        """End calls that take too long. The gateway calls this method once a second."""
        for sink in tuple(self.sinks):
            sink.check(now)

    def expire(self) -> None:
        """Remove calls that are too old. The gateway calls this method periodically."""
        now = time.time()
        for call_id in [each for each, known in self._known.items() if known.expires_at <= now]:
            del self._known[call_id]
            self.work.submit(self.store.remove, call_id)

    async def close(self) -> None:
        """Wait until all started writes are finished."""
        await self.work.finish()


def _write_head(request: DeferredRequest, length: int) -> bytes:
    """Return the head that is sent to the replica of a call."""
    head = request.request.head
    fields = head.without(frozenset({b"prefer", b"content-length"}))
    start = b"%b %b HTTP/1.1\r\n" % (head.method, request.request.target)
    return start + fields + b"Content-Length: %d\r\n%b\r\n" % (length, request.about)


def _read_head(result: StoredResult) -> ResponseHead:
    head = ResponseHead(result.status, False)
    length = b"Content-Length: %d" % len(result.body)
    head.fields = b"\r\n".join((result.status_line, *result.lines, length, b""))
    head.length = len(result.body)
    return head


T = TypeVar("T")
_log = logging.getLogger(__name__)


class BackgroundWork:
    """The tasks of one part of the gateway, and its thread. `failed` is logged with errors."""

    def __init__(self, name: str, failed: str) -> None:
        self._thread = ThreadPoolExecutor(1, name)
        self._failed = failed
        self._tasks: set[asyncio.Task[None]] = set()

    async def call(self, function: Callable[[], T]) -> T:
        """Call a function that blocks."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    def spawn(self, work: Coroutine[object, object, None]) -> None:
        """Start a task."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def submit(self, function: Callable[..., object], *values: object) -> None:
        """Let the thread call a function whose result does not matter."""
        self._thread.submit(function, *values)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            _log.error(self._failed, exc_info=task.exception())

    async def finish(self) -> None:
        """Wait until all tasks have ended."""
        while self._tasks:
            await asyncio.wait(self._tasks)
        self._thread.shutdown()

    async def cancel(self) -> None:
        """End all tasks."""
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._thread.shutdown()

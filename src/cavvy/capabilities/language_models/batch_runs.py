"""Runs the batches of OpenAI's API: checks the requests in a file, sends them to the replicas of
the project's services, and stores their results.

The requests have the lowest priority: one is sent only if a slot of its service is idle, or if the
batch would otherwise miss its deadline. They are sent in the order of the file, so a request whose
service is busy holds up those behind it. A request that was in flight when the gateway was killed
is sent again; each request has exactly one result.
"""

import asyncio
import heapq
import logging
import os
import random
import re
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from time import monotonic
from typing import Any, BinaryIO

import msgspec

from cavvy.capabilities.language_models.file_store import (
    LINE_MAX,
    BatchProblem,
    BatchState,
    FileStore,
    LongLine,
    StoredBatch,
    read_lines,
)
from cavvy.capabilities.serving.gateway.bodies import NO_JSON
from cavvy.capabilities.serving.gateway.call_store import StoredResult
from cavvy.capabilities.serving.gateway.config import ClientKey, GatewayLimits
from cavvy.capabilities.serving.gateway.deferred import BackgroundWork, DeferredSink
from cavvy.capabilities.serving.gateway.exchange import Exchange
from cavvy.capabilities.serving.gateway.heads import parse_request
from cavvy.capabilities.serving.gateway.own_answers import AnswerCode, OwnAnswer
from cavvy.capabilities.serving.gateway.service_queue import ServiceQueue
from cavvy.domain.values import Struct

Target = tuple[ServiceQueue, ClientKey | None]
KEPT_S = 30 * 86_400  # how long results, and ended batches, are stored
_LINES_MAX = 1_000_000
_PROBLEMS_MAX = 100
_ID_MAX, _SHOWN_MAX = 512, 100  # characters of a `custom_id`, and of a wrong value in a message
_IN_FLIGHT_MAX, _BYTES_MAX = 2048, 256 << 20  # requests of a batch, bytes of all batches
_LOW, _UNSENT_MAX = 256, 1 << 20  # requests in memory and their bytes: below it, more are read
_CHECKS_MAX = 2  # files whose lines are checked at the same time, on the loop that serves users
_AT_ONCE = 64  # requests that are sent before other work of the gateway
_LOOK_S = 0.05  # between two looks for idle slots
_TRIES_MAX, _BUSY_TRIES_MAX = 5, 20  # the second of a replica that is busy (429)
_SAFETY = 2.0  # of the time that the other requests need by the rate so far
_AGAIN_MAX = 1024  # requests that wait for another try, above which no more are begun
_BACKOFF_S, _BUSY_S, _WAIT_MAX_S = 1.0, 1.0, 60.0
_AGAIN_S = 5.0  # until results are written again that could not be written
# Answers of the gateway that say nothing about the request: it waits for its next try
_WAITS = frozenset(
    {
        *(AnswerCode.TOO_MANY, AnswerCode.QUEUE_FULL, AnswerCode.TOO_LATE),
        *(AnswerCode.BUDGET, AnswerCode.STOPPING),
    }
)
_LASTING = frozenset({AnswerCode.TOO_LARGE, AnswerCode.RESIDENCY, AnswerCode.NO_MODEL})
_REPEATED = frozenset({408, 409, 425, 429})  # and statuses of 500 and more
_LINE_END = re.compile(rb"[\r\n]")
_log = logging.getLogger(__name__)


class _BatchLine(Struct, frozen=True):
    """A request in the file of a batch."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _LineBody(Struct, frozen=True):
    model: str
    stream: Any = None


class _Line(Struct, kw_only=True):
    """A request that waits or runs."""

    number: int  # from 0, without empty lines
    custom_id: str
    body: bytes
    model: str
    tries: int = 0


_decode_line = msgspec.json.Decoder(_BatchLine).decode
_decode_body = msgspec.json.Decoder(_LineBody).decode
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_any = msgspec.json.Decoder().decode
_skip = msgspec.json.Decoder(msgspec.Raw).decode  # makes no objects, which may be millions
_encode = msgspec.json.Encoder().encode


class BatchRuns:
    """The batches that run. `find` returns the service for a model, and the key that the requests
    have, or None if the owners of the batch may use no such model.
    """

    def __init__(
        self,
        store: FileStore,
        limits: GatewayLimits,
        find: Callable[[tuple[str, ...], str], Target | None],
    ) -> None:
        self.store = store
        self.limits = limits
        self._find = find
        self._targets: dict[tuple[tuple[str, ...], str], Target | None] = {}  # at the moment
        self.awake = asyncio.Event()  # a slot may be idle
        self.checks = asyncio.Semaphore(_CHECKS_MAX)
        self._runs: dict[str, BatchRun] = {}
        self.work = BackgroundWork("openai-files", "the work on a batch failed")
        self._sends = False
        self._turn = 0
        self.bytes = 0  # of requests that were begun and have no result
        self.closing = False

    def start(self, batch: StoredBatch) -> None:
        run = self._runs[batch.id] = BatchRun(self, batch)
        self.work.spawn(self._run(run))
        self._start_sending()

    def _start_sending(self) -> None:
        if not self._sends and not self.closing:
            self._sends = True
            self.work.spawn(self._send())

    async def _run(self, run: "BatchRun") -> None:
        batch = run.batch
        try:
            while True:
                try:
                    return await run.run()
                except FileNotFoundError:
                    text = f"the file {batch.input_file_id} is not stored any more"
                    return await run.fail(BatchProblem(code="missing_file", message=text))
                except OSError as error:
                    _log.error("batch %s is tried again: %s", batch.id, error)
                await asyncio.sleep(_AGAIN_S)
                run = self._runs[batch.id] = BatchRun(self, batch)
        finally:
            del self._runs[batch.id]

    def stop(self, batch_id: str, state: BatchState) -> None:
        if (run := self._runs.get(batch_id)) is not None:
            run.stop(state)

    def check(self, now: float) -> None:
        """End what takes too long. Called once a second."""
        for run in tuple(self._runs.values()):
            run.check(now, time.time())
        if self._runs:
            self._start_sending()

    async def _send(self) -> None:
        """Send requests while slots are idle. The batches take turns."""
        loop = asyncio.get_running_loop()
        try:
            while self._runs and not self.closing:
                self._targets.clear()
                for sent in self._send_each():
                    if sent % _AT_ONCE == 0:
                        await asyncio.sleep(0)
                        self._targets.clear()
                self.awake.clear()
                timer = loop.call_later(_LOOK_S, self.awake.set)
                await self.awake.wait()
                timer.cancel()
        finally:
            self._sends = False

    def find(self, owners: tuple[str, ...], model: str) -> Target | None:
        asked = (owners, model)
        if asked not in self._targets:
            self._targets[asked] = self._find(owners, model)
        return self._targets[asked]

    def _send_each(self) -> Iterator[int]:
        """Send one request of each batch in turn until none can be sent, and yield their number
        after each.
        """
        sent, able = 0, list(self._runs.values())
        self._turn = self._turn + 1 if self._turn + 1 < len(able) else 0
        able = able[self._turn :] + able[: self._turn]
        while able and not self.closing:
            for run in tuple(able):
                if run.send_one(monotonic()):
                    sent += 1
                    yield sent
                else:
                    able.remove(run)

    async def close(self) -> None:
        """Stop sending, and write the results that have arrived. Requests in flight are sent again
        by the next gateway.
        """
        self.closing = True
        for run in tuple(self._runs.values()):
            await run.flush()
        await self.work.cancel()
        self.store.close()


class BatchRun:
    """One batch."""

    def __init__(self, runs: BatchRuns, batch: StoredBatch) -> None:
        self.batch = batch
        self._runs = runs
        self._store = runs.store
        self._input: BinaryIO | None = None  # open while requests are sent
        self._results: tuple[BinaryIO, BinaryIO] | None = None
        self._done = bytearray()  # by number, 1: the request has a result
        self._number = 0  # of the next line that is read
        self._lines: deque[tuple[int, bytes]] = deque()
        self._next: _Line | None = None
        self._again: list[tuple[float, int, _Line]] = []  # by the time of their next try
        self._reading = self._read = False
        self._in_flight: dict[DeferredSink, _Line] = {}
        self._unsent = 0  # bytes of `_lines`
        self._new: tuple[list[bytes], list[bytes]] = ([], [])  # results that are not written yet
        self._writes = asyncio.Lock()
        self._flushing = False
        self._held_until = 0.0
        self._urgent = False
        self._began: tuple[float, int] | None = None  # when sending began, and the results then
        self._ended = asyncio.Event()

    async def run(self) -> None:
        batch = self.batch
        if batch.state is BatchState.VALIDATING:
            async with self._runs.checks:
                await self._validate()
        if batch.state in (BatchState.IN_PROGRESS, BatchState.CANCELLING):
            await self._send_all()
            await self._set(BatchState.FINALIZING)
        if batch.state is BatchState.FINALIZING:
            now = int(time.time())
            files = await self._runs.work.call(
                lambda: self._store.finish_results(batch, now, KEPT_S)
            )
            self._store.files.update((each.id, each) for each in files)
            batch.has_output = batch.output_id in self._store.files
            batch.has_errors = batch.errors_id in self._store.files
            await self._set(batch.stop or BatchState.COMPLETED)

    async def fail(self, *problems: BatchProblem) -> None:
        self.batch.problems = problems
        await self._set(BatchState.FAILED)

    async def _set(self, state: BatchState) -> None:
        batch, now = self.batch, int(time.time())
        batch.state = state
        batch.changed_at[state] = now
        if state not in (BatchState.IN_PROGRESS, BatchState.CANCELLING, BatchState.FINALIZING):
            batch.forget_at = now + KEPT_S
        data = msgspec.structs.replace(batch)  # as it is now
        await self._runs.work.call(lambda: self._store.write_batch(data))

    def stop(self, state: BatchState) -> None:
        """End the batch before all requests are sent. Those that replicas have are finished."""
        if self.batch.stop is not None or self.batch.state is BatchState.FINALIZING:
            return
        self.batch.stop = state
        for sink, line in tuple(self._in_flight.items()):
            if sink.exchange is not None and not sink.exchange.is_taken():
                sink.exchange.abort()
                del self._in_flight[sink]
                self._repeat(line, 0.0)
        self._check_end()

    # validation

    async def _validate(self) -> None:
        batch = self.batch
        problems: list[BatchProblem] = []
        seen: set[str] = set()
        number = batch.total = 0
        async with aclosing(self._read_all()) as lines:
            async for line in lines:
                number += 1
                problem = None
                if line is None:
                    text = f"a line has at most {LINE_MAX >> 20} MiB"
                    problem = BatchProblem(code="line_too_long", message=text)
                elif line.strip():
                    batch.total += 1
                    problem = check_line(line, batch.endpoint, seen)
                if problem is not None:
                    problems.append(msgspec.structs.replace(problem, line=number))
                if len(problems) >= _PROBLEMS_MAX or batch.total > _LINES_MAX or batch.stop:
                    break
        if batch.total > _LINES_MAX:
            text = f"a batch has at most {_LINES_MAX:,} requests"
            problems.append(BatchProblem(code="too_many_requests", message=text))
        elif not batch.total and not problems and not batch.stop:
            problems.append(BatchProblem(code="empty_file", message="the file has no requests"))
        if batch.stop or problems:
            batch.total = 0
        if batch.stop:
            await self._set(batch.stop)
        elif problems:
            await self.fail(*problems)
        else:
            await self._set(BatchState.IN_PROGRESS)

    async def _read_all(self) -> AsyncGenerator[bytes | None, None]:
        """Yield the lines of the file, or None in place of one that is too long."""
        file = await self._runs.work.call(lambda: self._store.open_file(self.batch.input_file_id))
        try:
            while lines := await self._runs.work.call(lambda: read_lines(file)):
                for line in lines:
                    yield line
                await asyncio.sleep(0)
        except LongLine:
            yield None
        finally:
            file.close()

    # sending

    async def _send_all(self) -> None:
        batch = self.batch
        self._done = await self._runs.work.call(lambda: self._store.resume(batch))
        self._results = await self._runs.work.call(lambda: self._store.open_results(batch))
        self._began = (monotonic(), batch.completed + batch.failed)
        file = await self._runs.work.call(lambda: self._store.open_file(batch.input_file_id))
        try:
            self._input = file
            await self._refill()
            await self._ended.wait()
            if batch.stop is not None:
                await self._write_rest()
        finally:
            self._input = None
            for each in (file, *self._results):
                each.close()

    def send_one(self, now: float) -> bool:
        """Send the next request if a slot is idle; return whether one was sent or has failed."""
        if self._input is None or self.batch.stop or now < self._held_until:
            return False
        if len(self._in_flight) >= _IN_FLIGHT_MAX:
            return False
        line = self._peek(now)
        if line is None:
            return False
        target = self._runs.find(self.batch.owners, line.model)
        if target is None:
            self._take(line)
            text = f"no single service that the batch may use has the model {line.model!r}"
            self._settle(line, OwnAnswer(404, AnswerCode.NO_MODEL, text))
            return True
        service, key = target
        if service.count_idle(self._urgent) <= 0:
            return False
        if (wait_s := self._limit(service, key, now)) > 0:
            self._held_until = now + wait_s
            return False
        self._take(line)
        self._start(line, service, key)
        return True

    def _peek(self, now: float) -> _Line | None:
        if self._again and self._again[0][0] <= now:
            return self._again[0][2]
        if len(self._again) >= _AGAIN_MAX or self._runs.bytes >= _BYTES_MAX:
            return None
        if self._next is None and self._lines:
            number, data = self._lines.popleft()
            self._unsent -= len(data)
            self._next = _read_line(number, data)
        if self._is_low() and not self._reading:
            self._reading = True
            self._runs.work.spawn(self._refill())
        return self._next

    def _take(self, line: _Line) -> None:
        if line is self._next:
            self._next = None
            self._runs.bytes += len(line.body)
        else:
            heapq.heappop(self._again)

    def _is_low(self) -> bool:
        return len(self._lines) < _LOW and self._unsent < _UNSENT_MAX and not self._read

    async def _refill(self) -> None:
        """Read more requests, without those that have a result."""
        file = self._input
        assert file is not None
        self._reading = True
        while self._is_low():
            lines = await self._runs.work.call(lambda: read_lines(file))
            self._read = not lines
            for line in filter(bytes.strip, lines):
                if self._number >= len(self._done):
                    break  # the file was changed by hand
                if not self._done[self._number]:
                    self._lines.append((self._number, line))
                    self._unsent += len(line)
                self._number += 1
        self._reading = False
        self._runs.awake.set()
        self._check_end()

    def _limit(self, service: ServiceQueue, key: ClientKey | None, now: float) -> float:
        """Count a request in the rates of its service and its key; return the seconds to wait."""
        if key is not None:
            if wait_s := service.keys.wait_s(key, now):
                return wait_s
            limit = service.limits.get(key.id)
            if limit is not None and limit.refuse_spent(time.time()) is not None:
                return _BUSY_S
        if service.rates:
            endpoint = self.batch.endpoint.encode()
            data = b"POST %b HTTP/1.1\r\nHost: batch\r\n\r\n" % endpoint
            head = parse_request(data, self._runs.limits)
            key_id = "" if key is None else key.id
            client = self.batch.owners[0].encode()  # all batches of a key are one client
            if full := service.rates.take(head, endpoint, key_id, client, now):
                return full[1]
        return 0.0

    def _start(self, line: _Line, service: ServiceQueue, key: ClientKey | None) -> None:
        route, key_id = service.route, "" if key is None else key.id
        request_id = self._name(line).encode()
        fields = b"".join(
            (
                b"Host: %b\r\n" % (route.hosts[0] if route.hosts else "localhost").encode(),
                b"Content-Type: application/json\r\nAccept: application/json\r\n",
                b"Idempotency-Key: %b\r\nContent-Length: %d\r\n" % (request_id, len(line.body)),
                service.keys.write_residency(key_id),
            )
        )
        start = b"POST %b HTTP/1.1\r\n" % self.batch.endpoint.encode()
        head = parse_request(b"%b%b\r\n" % (start, fields), self._runs.limits)
        sink = DeferredSink(request_id.decode(), route.deferred_bytes, self._end)
        places = service.keys.bind(head, key_id)
        if places and not service.may_stay(places):
            text = f"the service has no replicas in {', '.join(sorted(places))}"
            self._settle(line, OwnAnswer(421, AnswerCode.RESIDENCY, text))
            return
        if len(line.body) > route.body_max:
            text = f"a request of the service has at most {route.body_max} bytes"
            self._settle(line, OwnAnswer(413, AnswerCode.TOO_LARGE, text))
            return
        about = b"%bX-Request-Id: %b\r\n\r\n" % (service.prefix_field, request_id)
        exchange = Exchange(sink, service.entry, head, start + head.fields + about, monotonic())
        service.meters.open(exchange, head.target, line.model)
        exchange.key_id, exchange.places, exchange.model = key_id, places, line.model
        sink.exchange = exchange
        self._in_flight[sink] = line
        line.tries += 1
        if (refused := exchange.feed(line.body, True)) is not None:
            sink.answer(refused)
        else:
            exchange.begin()

    def _end(self, sink: DeferredSink, result: StoredResult) -> None:
        if (line := self._in_flight.pop(sink, None)) is not None:
            self._settle(line, sink.own or result)
            self._runs.awake.set()

    def _settle(self, line: _Line, answer: OwnAnswer | StoredResult) -> None:
        """Store the result of a request, or let the request wait for its next try."""
        own = answer if isinstance(answer, OwnAnswer) else None
        if own is not None and own.code in _WAITS:
            line.tries -= 1
            wait_s = min(own.retry_s or _BUSY_S, _WAIT_MAX_S)
            self._held_until = monotonic() + wait_s  # the next request would get the same answer
            self._repeat(line, wait_s)
        elif own is not None and own.code is AnswerCode.NO_MODEL and line.tries < _TRIES_MAX:
            line.tries += 1  # its service may be about to change
            self._repeat(line, _BACKOFF_S * 2 ** (line.tries - 1))
        elif may_repeat(own, answer.status, line.tries):
            wait_s = min(_BACKOFF_S * 2 ** (line.tries - 1), _WAIT_MAX_S)
            self._repeat(line, wait_s * random.uniform(0.5, 1))
        elif isinstance(answer, OwnAnswer):
            self._record(line, None, {"code": answer.code.value, "message": answer.message}, True)
        else:
            self._record(line, answer, None, not 200 <= answer.status < 300)

    def _repeat(self, line: _Line, wait_s: float) -> None:
        heapq.heappush(self._again, (monotonic() + wait_s, line.number, line))

    def _name(self, line: _Line) -> str:
        return f"batch_req_{self.batch.id[6:]}_{line.number:x}"

    # results

    def _record(
        self,
        line: _Line,
        result: StoredResult | None,
        error: dict[str, str] | None,
        failed: bool,
    ) -> None:
        name = self._name(line)
        self._runs.bytes -= len(line.body)
        response = b"null"
        if result is not None:
            about = _encode({"status_code": result.status, "request_id": name})
            response = b'%b,"body":%b}' % (about[:-1], _write_body(result.body))
        self._new[failed].append(
            b'{"id":"%b","custom_id":%b,"response":%b,"error":%b}\n'
            % (name.encode(), _encode(line.custom_id), response, _encode(error))
        )
        if not self._flushing and not self._runs.closing:
            self._flushing = True
            self._runs.work.spawn(self.flush())

    async def flush(self) -> None:
        """Write the new results. What cannot be written now is written later."""
        async with self._writes:
            while any(self._new) and self._results is not None:
                new, self._new = self._new, ([], [])
                for lines, file in zip(new, self._results, strict=True):
                    await self._write(b"".join(lines), file)
                self.batch.completed += len(new[0])
                self.batch.failed += len(new[1])
            self._flushing = False
        self._check_end()

    async def _write(self, data: bytes, file: BinaryIO) -> None:
        while data:
            try:
                return await self._runs.work.call(lambda: _append(file, data))
            except OSError as error:
                _log.error("results of batch %s cannot be written: %s", self.batch.id, error)
                if self._runs.closing:
                    return  # their requests are sent again
                self._held_until = monotonic() + _AGAIN_S
                await asyncio.sleep(_AGAIN_S)

    async def _write_rest(self) -> None:
        """Store an error as the result of each request that was not sent."""
        what = "was cancelled" if self.batch.stop is BatchState.CANCELLED else "expired"
        code = "batch_cancelled" if self.batch.stop is BatchState.CANCELLED else "batch_expired"
        error = {"code": code, "message": f"the batch {what} before this request was finished"}
        for _, _, line in self._again:
            self._record(line, None, error, True)
        rest = [] if self._next is None else [self._next]
        while True:
            rest += [_read_line(*each) for each in self._lines]
            self._runs.bytes += sum(len(line.body) for line in rest)
            for line in rest:
                self._record(line, None, error, True)
            rest.clear()
            self._lines.clear()
            self._unsent = 0
            await self.flush()
            if self._read:
                return
            await self._refill()

    def _check_end(self) -> None:
        if self._in_flight or any(self._new) or self._flushing or self._reading:
            return
        left = self._lines or self._next or self._again or not self._read
        if self._input is not None and (self.batch.stop or not left):
            self._ended.set()

    # time

    def check(self, now: float, clock: float) -> None:
        for sink in tuple(self._in_flight):
            sink.check(now)
        batch = self.batch
        if clock >= batch.expires_at:
            self.stop(BatchState.EXPIRED)
        self._check_end()
        if self._began is not None:
            since, before = self._began
            self._urgent = is_urgent(
                batch, batch.completed + batch.failed - before, now - since, clock
            )


def is_urgent(batch: StoredBatch, done: int, taken_s: float, clock: float) -> bool:
    """Return whether a batch may miss its deadline in idle slots alone. `done` requests have got
    their results in the last `taken_s` seconds.
    """
    left_s = batch.expires_at - clock
    if not done:
        return left_s < (batch.expires_at - batch.created_at) / 2
    needed_s = (batch.total - batch.completed - batch.failed) * taken_s / done
    return left_s < _SAFETY * needed_s


def may_repeat(own: OwnAnswer | None, status: int, tries: int) -> bool:
    """Return whether another try may give another answer, after a number of tries."""
    if own is not None and own.code in _LASTING:
        return False
    if tries >= (_BUSY_TRIES_MAX if status == 429 else _TRIES_MAX):
        return False
    is_removed = own is not None and own.code is AnswerCode.NO_SERVICE
    return is_removed or status >= 500 or status in _REPEATED


def check_line(line: bytes, endpoint: str, seen: set[str]) -> BatchProblem | None:
    """Return what is wrong with a request of a batch, or None. `seen` are the IDs before it."""
    try:
        asked = _decode_line(line)
    except NO_JSON as error:
        valid = _is_json(line)
        if missing := _find_missing(line):
            text = f"the line has no `{missing}`"
            return BatchProblem(code="missing_required_parameter", message=text, param=missing)
        text = "a line is a JSON object with `custom_id`, `method`, `url` and `body`"
        code = "invalid_request" if valid else "invalid_json_line"
        return BatchProblem(code=code, message=f"{text}: {error}")
    if not asked.custom_id:
        return BatchProblem(code="invalid_custom_id", message="`custom_id` is empty")
    if len(asked.custom_id) > _ID_MAX:
        text = f"`custom_id` has at most {_ID_MAX} characters"
        return BatchProblem(code="invalid_custom_id", message=text, param="custom_id")
    if asked.custom_id in seen:
        text = f"another line has the custom_id {asked.custom_id[:_SHOWN_MAX]!r}"
        return BatchProblem(code="duplicate_custom_id", message=text, param="custom_id")
    seen.add(asked.custom_id)
    if asked.method != "POST":
        return BatchProblem(code="invalid_method", message="`method` is POST", param="method")
    if asked.url != endpoint:
        text = f"`url` is {asked.url[:_SHOWN_MAX]!r}, but the batch's endpoint is {endpoint!r}"
        return BatchProblem(code="invalid_url", message=text, param="url")
    try:
        body = _decode_body(asked.body)
    except NO_JSON as error:
        text = f"`body` is a JSON object with a string `model`: {error}"
        return BatchProblem(code="invalid_request", message=text, param="body")
    if body.stream:
        text = "a request of a batch gets no stream; remove `stream`"
        return BatchProblem(code="invalid_request", message=text, param="stream")
    return None


def _find_missing(line: bytes) -> str | None:
    """Return a field that a line should have."""
    try:
        given = _decode_fields(line)
    except NO_JSON:
        return None
    return next((each for each in _BatchLine.__struct_fields__ if each not in given), None)


def _is_json(line: bytes) -> bool:
    try:
        _skip(line)
    except NO_JSON:
        return False
    return True


def _read_line(number: int, line: bytes) -> _Line:
    """Read a request. One that a disk has damaged since its check asks for a model that is none."""
    try:
        asked = _decode_line(line)
        body = bytes(asked.body)
        model = _decode_body(body).model
    except NO_JSON:
        return _Line(number=number, custom_id="", body=b"", model="")
    return _Line(number=number, custom_id=asked.custom_id, body=body, model=model)


def _write_body(body: bytes) -> bytes:
    """Return a response as JSON in one line. Other formats become a string."""
    try:
        _decode_any(body)
    except NO_JSON:
        return _encode(body.decode(errors="replace"))
    return _LINE_END.sub(b" ", body)  # JSON has line ends only between its tokens


def _append(file: BinaryIO, data: bytes) -> None:
    """Append lines to a file that is not buffered: all of them, or none."""
    size = os.fstat(file.fileno()).st_size
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except OSError:
        os.ftruncate(file.fileno(), size)
        raise

"""Sends several waiting requests of a service to a replica as one request, and divides the
response.

A batch is an exchange with a replica like any other. Its response goes to a `JoinedBatch` instead
of a client. The connection to the replica treats the batch as one request; the queue counts each
member as a request. If a batch fails, each member of the batch is sent again as a separate request.
If the replica refuses a large batch, the halves of the batch are sent first, because usually only
one request of a batch is wrong.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from math import inf
from time import monotonic
from typing import TYPE_CHECKING

from cavvy.gateway.batching import (
    ArrivalGaps,
    WaitingRequest,
    average_fits,
    choose_size,
    find_start,
)
from cavvy.gateway.config import BatchTerms, ServiceRoute
from cavvy.gateway.exchange import Exchange
from cavvy.gateway.heads import RequestHead, ResponseHead
from cavvy.gateway.joined_bodies import JoinableBody, join_bodies, read_body, split_response
from cavvy.gateway.own_answers import AnswerCode
from cavvy.gateway.statistics import BatchFacts

if TYPE_CHECKING:
    from cavvy.gateway.upstream import ReplicaPool

_SCANNED = 1024  # waiting requests among which those are looked for that can be joined
_RESPONSE_MAX = 64 << 20
_IDS_MAX = 4096  # bytes of the field with the IDs; servers such as gunicorn refuse 8 KiB
_LONGEST_GAP = 10  # of `wait_s`
_HALVED = 8  # a batch of so many requests that is refused is sent again in halves
_OF_LOAD = frozenset({429, 503})  # statuses that concern the replica, not a request
# Fields in which joined requests may differ. The replica does not get them.
_OF_ONE = frozenset(
    (
        *(b"content-length", b"x-request-id", b"x-forwarded-for", b"user-agent"),
        *(b"accept-encoding", b"idempotency-key", b"prefer", b"date", b"traceparent"),
        *(b"tracestate", b"baggage"),
    )
)
# Fields of a response that are about its whole body, or for one client.
_OF_WHOLE = frozenset(
    (
        *(b"content-length", b"etag", b"content-md5", b"digest", b"content-digest"),
        *(b"repr-digest", b"set-cookie"),
    )
)


class BatchPart:
    """The contribution of a request to a batch. Requests with the same `group` can be joined. After
    a batch was refused, its requests are split into two halves, and `half` identifies a request's
    half. Only requests of the same half are joined again.
    """

    __slots__ = ("body", "group", "half", "instances", "request_id")

    def __init__(self, body: JoinableBody, out_head: bytes) -> None:
        start, *lines = out_head.split(b"\r\n")[:-2]
        shared = []
        self.request_id = b""
        for line in lines:
            name = line.partition(b":")[0].lower()
            if name == b"x-request-id":
                self.request_id = line.partition(b":")[2].strip()
            if name not in _OF_ONE:
                shared.append(line)
        self.body = body
        self.instances = len(body.instances)
        self.group = (b"\r\n".join((start, *shared)), body.others)
        self.half: object | None = None

    def write(self, others: Sequence["BatchPart"], name: str) -> bytes:
        """Return the request that sends the batch of this part and `others` to the replica."""
        body = join_bodies((each.body for each in (self, *others)), name)
        ids = _join_ids(each.request_id for each in (self, *others))
        return (
            b"%b\r\nX-Request-Id: %b\r\nCavvy-Batch-Requests: %b\r\nContent-Length: %d\r\n\r\n%b"
            % (self.group[0], self.request_id, ids, len(body), body)
        )


class JoinedBatch:
    """The sink of a batch: each member receives its part of the response."""

    passes_chunks = False

    def __init__(self, members: Sequence[Exchange], pool: "ReplicaPool", output: str) -> None:
        self.members = members
        self.counts = [_part_of(each).instances for each in members]
        self.instances = sum(self.counts)
        self.spoiled = False  # the response could not be divided
        self.dividing = False  # the response has arrived
        self._pool = pool
        self._output = output
        self._head: ResponseHead | None = None
        self._pieces: list[bytes] = []
        self._size = 0

    def list_present(self) -> list[Exchange]:
        """Return the members whose clients still wait."""
        return [each for each in self.members if not each.gone]

    def separate(self) -> None:
        """Separate the members of a batch whose response could not be divided, so that an invalid
        request does not make the other members fail.
        """
        present = self.list_present()
        refused = self._head is not None and 400 <= self._head.status < 500
        if refused and len(present) >= _HALVED:
            middle = len(present) // 2
            for half in (present[:middle], present[middle:]):
                mark = object()
                for each in half:
                    _part_of(each).half = mark
        else:
            for each in present:
                each.part = None

    # what the replica's connection calls

    def respond(self, head: ResponseHead, payload: bytes, done: bool) -> None:
        self._head = head
        self.send(payload, done)

    def send(self, payload: bytes, done: bool) -> None:
        self._size += len(payload)
        if self._size > _RESPONSE_MAX:
            self._pieces.clear()
        else:
            self._pieces.append(payload)
        if done:
            self._divide()

    def pass_chunk(self, data: bytes) -> None: ...

    def send_interim(self, head: ResponseHead) -> None: ...

    def switch(self, head: ResponseHead, payload: bytes) -> None: ...

    def answer(self, status: int, code: AnswerCode, message: str, retry_s: int | None) -> None: ...

    def cut(self) -> None: ...

    def end(self) -> None:
        """End each member's exchange. If the response could not be divided, the members are queued
        again.
        """
        if self.spoiled:
            self._pool.service.requeue_spoiled(self)
            return
        for each in self.list_present():
            each.sink.end()

    def want_body(self) -> None:
        for each in self.members:
            if each.tells:
                each.sink.want_body()

    def pause_body(self) -> None: ...

    def resume_body(self) -> None: ...

    def _divide(self) -> None:
        head, self.dividing = self._head, True
        assert head is not None
        body = b"".join(self._pieces)
        bodies = None
        if self._size <= _RESPONSE_MAX:
            if head.status in _OF_LOAD:
                bodies = [body] * len(self.members)
            elif 200 <= head.status < 300:
                bodies = split_response(body, self._output, self.counts)
        if bodies is None:
            self.spoiled = True
            return
        now = monotonic()
        for member, part in zip(self.members, bodies, strict=True):
            if not member.gone:
                member.responding = True
                member.price = self._pool.price(member, now)
                member.sink.respond(_head_of(head, len(part)), part, True)


class ServiceBatches:
    """Forms the batches of one service. `dispatch` is called when a batch has waited long enough
    for further requests."""

    def __init__(
        self, terms: BatchTerms, route: ServiceRoute, dispatch: Callable[[], None]
    ) -> None:
        self.terms = terms
        self._due_s = inf if route.slow_s is None else route.slow_s
        self._response_s = route.response_s
        # A request that arrives while a batch runs waits for it, so both must end in time.
        self._most_s = min(self._due_s / 2, self._response_s)
        self._wait_s = route.wait_s
        self._start_waiting = dispatch
        self._gaps = ArrivalGaps(max(_LONGEST_GAP * terms.wait_s, 1e-3))
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = inf
        self._formed = self._joined = self._spoiled = 0

    def may_join(self, head: RequestHead) -> bool:
        """Return whether the head of a request permits the request to be joined to a batch."""
        if head.method != b"POST" or head.length <= 0 or head.upgrade:
            return False
        media = head.get_header(b"content-type").partition(b";")[0].strip().lower()
        streams = b"event-stream" in head.get_header(b"accept")
        return media == b"application/json" and not streams

    def read_part(self, exchange: Exchange, now: float) -> BatchPart | None:
        """Return the contribution of a request with a complete body to a batch, or None if the
        request cannot be joined.
        """
        body = read_body(b"".join(exchange.held), self.terms.input)
        if body is None or len(body.instances) > self.terms.max:
            return None
        self._gaps.add(len(body.instances), now)
        return BatchPart(body, exchange.out_head)

    def is_early(
        self,
        first: Exchange,
        waiting: Iterable[Exchange],
        pool: "ReplicaPool",
        free: int,
        now: float,
    ) -> bool:
        """Return whether the batch of this request should wait for further requests. If the batch
        waits, a timer calls `dispatch` later."""
        if free > 1 or not self.terms.wait_s or first.part is None or first.part.half is not None:
            return False
        mine = self._find(first, waiting, pool)
        start_at = find_start(
            [self._describe(each, now) for each in mine],
            first.arrived_at,
            self._gaps,
            pool.batch_times,
            self.terms.max,
            self.terms.wait_s,
            now,
        )
        if start_at <= now:
            return False
        if start_at < self._timer_at:
            self.close()
            self._timer_at = start_at
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(start_at - now, self._dispatch)
        return True

    def _dispatch(self) -> None:
        self.close()
        self._start_waiting()

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_at = None, inf

    def choose(
        self,
        first: Exchange,
        waiting: Iterable[Exchange],
        pool: "ReplicaPool",
        free: int,
        now: float,
    ) -> list[Exchange]:
        """Return the requests that form the next batch, `first` included."""
        mine = self._find(first, waiting, pool)
        rows = [self._describe(each, now) for each in mine]
        return mine[: choose_size(rows, pool.batch_times, self.terms.max, free, now)]

    def join(self, members: Sequence[Exchange], pool: "ReplicaPool") -> Exchange:
        """Return the exchange that sends these members to a replica as one batch."""
        first = members[0]
        parts = [_part_of(each) for each in members]
        batch = JoinedBatch(members, pool, self.terms.output)
        out = parts[0].write(parts[1:], self.terms.input)
        carrier = Exchange(batch, pool.service, first.head, out, first.arrived_at, 0)
        carrier.batch = batch
        carrier.body_done = True
        carrier.tells = any(each.tells for each in members)
        self._formed += 1
        self._joined += len(members)
        for each in members:
            each.carrier = carrier
            each.attempts += 1
        return carrier

    def adopt(self, old: "ServiceBatches") -> None:
        """Copy the counts of `old`, which belongs to an older route of the same service."""
        self._formed, self._joined, self._spoiled = old._formed, old._joined, old._spoiled
        self._gaps = old._gaps

    def describe(self, pools: Iterable["ReplicaPool"]) -> BatchFacts:
        """Return the counts of batches, and the mean of the batch-time models of these replicas."""
        times = (pool.batch_times for pool in pools)
        return BatchFacts(
            formed=self._formed,
            joined=self._joined,
            spoiled=self._spoiled,
            fit=average_fits(times, self._gaps.instances, self.terms.max, self._most_s),
        )

    def count_spoiled(self) -> None:
        self._spoiled += 1

    def count_work_s(self, pool: "ReplicaPool", instances: int, taken_s: float) -> float:
        """Record the processing time of a batch, or of a request that was not joined. Return the
        part of the processing time that counts as work; see `BatchTimes.count_work_s`.
        """
        pool.batch_times.add(instances, taken_s)
        return pool.batch_times.count_work_s(instances, taken_s, self.terms.max, self._most_s)

    def _find(
        self, first: Exchange, waiting: Iterable[Exchange], pool: "ReplicaPool"
    ) -> list[Exchange]:
        part = _part_of(first)
        mine, total = [first], part.instances
        for number, each in enumerate(waiting):
            if total >= self.terms.max or number >= _SCANNED:
                break
            other = each.part
            if each is first or other is None or other.half is not part.half:
                continue
            if other.group != part.group:
                continue
            if each.avoid is not pool and pool.permits(each):
                mine.append(each)
                total += other.instances
        return mine

    def _describe(self, exchange: Exchange, now: float) -> WaitingRequest:
        patience_s = self._due_s
        if exchange.wait_s < self._wait_s:  # the client has stated how long it waits
            patience_s = min(patience_s, exchange.wait_s)
        due_at = min(exchange.arrived_at + patience_s, now + self._response_s)
        return WaitingRequest(_part_of(exchange).instances, due_at)


def _join_ids(ids: Iterable[bytes]) -> bytes:
    """Return the IDs, separated by commas; omit the last IDs if the header field would be too
    long."""
    joined = b",".join(ids)
    return joined if len(joined) <= _IDS_MAX else joined[: joined.rindex(b",", 0, _IDS_MAX)]


def _part_of(exchange: Exchange) -> BatchPart:
    assert exchange.part is not None
    return exchange.part


def _head_of(whole: ResponseHead, length: int) -> ResponseHead:
    """Return the head of the response to one request of a batch."""
    head = ResponseHead(whole.status, False)
    lines = whole.fields.split(b"\r\n")[:-1]
    kept = [line for line in lines if line.partition(b":")[0].lower() not in _OF_WHOLE]
    head.fields = b"\r\n".join((*kept, b"Content-Length: %d\r\n" % length))
    head.length = length
    return head

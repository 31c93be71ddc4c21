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

from cavvy.capabilities.serving.gateway.batching import (
    ArrivalGaps,
    BatchPart,
    WaitingRequest,
    average_fits,
    choose_size,
    find_start,
    read_body,
    split_response,
)
from cavvy.capabilities.serving.gateway.config import BatchTerms, ServiceRoute
from cavvy.capabilities.serving.gateway.exchange import Exchange
from cavvy.capabilities.serving.gateway.heads import RequestHead, ResponseHead
from cavvy.capabilities.serving.gateway.own_answers import OwnAnswer
from cavvy.capabilities.serving.gateway.statistics import BatchFacts
from cavvy.capabilities.serving.gateway.upstream import ReplicaPool

_SCAN_MAX = 1024  # waiting requests among which those are looked for that can be joined
_RESPONSE_MAX = 64 << 20
_LONGEST_GAP = 10  # of `wait_s`
_HALVES_MIN = 8  # a batch of so many requests that is refused is sent again in halves
_OF_LOAD = frozenset({429, 503})  # statuses that concern the replica, not a request
# Fields of a response that are about its whole body, or for one client.
_OF_WHOLE = frozenset(
    (
        *(b"content-length", b"etag", b"content-md5", b"digest", b"content-digest"),
        *(b"repr-digest", b"set-cookie"),
    )
)


class JoinedBatch:
    """The sink of a batch: each member receives its part of the response."""

    passes_chunks = False

    def __init__(self, members: Sequence[Exchange], pool: ReplicaPool, output: str) -> None:
        self._members = members
        self._answered: list[Exchange] = []  # members that have their part of the response
        self._pool = pool
        self._output = output
        self._head: ResponseHead | None = None
        self._pieces: list[bytes] = []
        self._size = 0

    def respond(self, head: ResponseHead, payload: bytes, done: bool, more: bytes = b"") -> None:
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

    def answer(self, answer: OwnAnswer) -> None: ...

    def cut(self) -> None: ...

    def end(self) -> None:
        """End each member's exchange. If the response could not be divided, the queue has the
        members again.
        """
        for each in self._answered:
            if not each.gone:
                each.sink.end()

    def want_body(self) -> None:
        for each in self._members:
            if each.tells:
                each.sink.want_body()

    def pause_body(self) -> None: ...

    def resume_body(self) -> None: ...

    def _divide(self) -> None:
        head, carrier = self._head, self._members[0].carrier
        assert head is not None
        assert carrier is not None
        carrier.divides = True
        body = b"".join(self._pieces)
        bodies = None
        if self._size <= _RESPONSE_MAX:
            if head.status in _OF_LOAD:
                bodies = [body] * len(self._members)
            elif 200 <= head.status < 300:
                counts = [each.weight for each in self._members]
                bodies = split_response(body, self._output, counts)
        if bodies is None:
            carrier.spoiled = True
            carrier.may_halve = 400 <= head.status < 500
            return
        now = monotonic()
        for member, part in zip(self._members, bodies, strict=True):
            if not member.gone:
                member.responding = True
                self._answered.append(member)
                price = self._pool.price(member, now)
                member.sink.respond(_head_of(head, len(part)), part, True, price)


class ServiceBatches:
    """Forms the batches of one service. `dispatch` is called when a batch has waited long enough
    for further requests."""

    def __init__(
        self,
        terms: BatchTerms,
        route: ServiceRoute,
        hold_bytes: int,
        dispatch: Callable[[], None],
    ) -> None:
        self.terms = terms
        self._hold_bytes = hold_bytes
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

    def is_read(self, exchange: Exchange) -> bool:
        """Return whether the queue may take the request, or False if more of the body must arrive
        before the request can be joined. A body that is too large for the gateway to hold is never
        joined into a batch.
        """
        if exchange.joins is None:
            exchange.joins = self._may_join(exchange.head)
            if exchange.joins and not exchange.body_done:
                exchange.sink.want_body()  # of a client that waits for "100 Continue"
        if not exchange.joins:
            return True
        if not exchange.body_done:
            return exchange.held_bytes > self._hold_bytes
        exchange.set_part(self._read_part(exchange, exchange.arrived_at))
        return True

    def _may_join(self, head: RequestHead) -> bool:
        """Return whether the head of a request permits the request to be joined to a batch."""
        if head.method != b"POST" or head.length <= 0 or head.upgrade:
            return False
        media = head.get_header(b"content-type").partition(b";")[0].strip().lower()
        streams = b"event-stream" in head.get_header(b"accept")
        return media == b"application/json" and not streams

    def _read_part(self, exchange: Exchange, now: float) -> BatchPart | None:
        """Return the contribution of a request with a complete body to a batch, or None if the
        request cannot be joined.
        """
        body = read_body(b"".join(exchange.held), self.terms.input)
        if body is None or len(body.instances) > self.terms.max:
            return None
        self._gaps.add(len(body.instances), now)
        return BatchPart(body, exchange.out_head)

    def is_early(
        self, first: Exchange, waiting: Iterable[Exchange], pool: ReplicaPool, free: int
    ) -> bool:
        """Return whether the batch of this request should wait for further requests. If the batch
        waits, a timer calls `dispatch` later."""
        if free > 1 or not self.terms.wait_s or first.part is None or first.part.half is not None:
            return False
        mine, now = self._find(first, waiting, pool), monotonic()
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
        pool: ReplicaPool,
        free: int,
        now: float,
    ) -> list[Exchange]:
        """Return the requests that form the next batch, `first` included."""
        mine = self._find(first, waiting, pool)
        rows = [self._describe(each, now) for each in mine]
        return mine[: choose_size(rows, pool.batch_times, self.terms.max, free, now)]

    def join(self, members: Sequence[Exchange], pool: ReplicaPool) -> Exchange:
        """Return the exchange that sends these members to a replica as one batch."""
        first = members[0]
        parts = [_part_of(each) for each in members]
        batch = JoinedBatch(members, pool, self.terms.output)
        out = parts[0].write(parts[1:], self.terms.input)
        carrier = Exchange(batch, first.entry, first.head, out, first.arrived_at)
        carrier.keep_bytes = 0  # the queue repeats the members instead
        carrier.members = members
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

    def describe(self, pools: Iterable[ReplicaPool]) -> BatchFacts:
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

    def count_work_s(self, pool: ReplicaPool, instances: int, taken_s: float) -> float:
        """Record the processing time of a batch, or of a request that was not joined. Return the
        part of the processing time that counts as work; see `BatchTimes.count_work_s`.
        """
        pool.batch_times.add(instances, taken_s)
        return pool.batch_times.count_work_s(instances, taken_s, self.terms.max, self._most_s)

    def _find(
        self, first: Exchange, waiting: Iterable[Exchange], pool: ReplicaPool
    ) -> list[Exchange]:
        part = _part_of(first)
        mine, total = [first], part.instances
        for number, each in enumerate(waiting):
            if total >= self.terms.max or number >= _SCAN_MAX:
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


def separate(carrier: Exchange) -> None:
    """Separate the members of a batch whose response could not be divided, so that an invalid
    request does not make the other members fail.
    """
    present = carrier.list_present()
    if carrier.may_halve and len(present) >= _HALVES_MIN:
        middle = len(present) // 2
        for half in (present[:middle], present[middle:]):
            mark = object()
            for each in half:
                _part_of(each).half = mark
    else:
        for each in present:
            each.set_part(None)


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

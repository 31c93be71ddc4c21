"""The last step of a request: connections to replicas, and the pool of one replica's connections.

The pool reports the end of each exchange to its queue, with the slot that becomes free.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from time import monotonic
from typing import cast

from cavvy.capabilities.serving.gateway.batching import BatchTimes
from cavvy.capabilities.serving.gateway.bodies import Body, ChunkedBody, OpenBody, make_body
from cavvy.capabilities.serving.gateway.config import ReplicaAddress, ServiceRoute
from cavvy.capabilities.serving.gateway.exchange import Exchange, Outcome
from cavvy.capabilities.serving.gateway.heads import (
    HeadError,
    HeadMemo,
    ResponseHead,
    may_begin_response,
)
from cavvy.capabilities.serving.gateway.redirects import WITH_LOCATION, guard
from cavvy.capabilities.serving.gateway.seams import (
    RequestAffinity,
    ScoredReplica,
    UnpreparedError,
)
from cavvy.capabilities.serving.gateway.statistics import ReplicaFacts
from cavvy.capabilities.serving.gateway.work import ReplicaWork
from cavvy.domain.values import Struct

_CONNECT_S = 5.0
# first and longest delay before a replica that refused connections is tried again
_BACKOFF_S, _BACKOFF_MAX_S = 0.1, 5.0
_HEAD_MAX = 65_536
# A replica may close an unused connection while a request is on its way. A request that must not be
# repeated is sent on a connection that was used before only if the connection was unused for less
# than `_FRESH_S`, and the replica has kept a connection open that was unused for `_PATIENCE_S`.
_FRESH_S, _PATIENCE_S = 1.0, 2.0
PRICE_FIELD = b"Cavvy-Price-Micros"
# for which the replica is not to blame
_NO_FAILURES = (Outcome.ABORTED, Outcome.UNSENT, Outcome.UNPREPARED)


class UpstreamConnection(asyncio.Protocol):
    """A connection to a replica. The connection serves one exchange at a time."""

    __slots__ = (
        "_body",
        "_buffer",
        "_chunks",
        "_ends",
        "_exchange",
        "_tunnel",
        "closed",
        "idle_at",
        "pool",
        "transport",
    )

    transport: asyncio.Transport

    def __init__(self, pool: "ReplicaPool") -> None:
        self.pool = pool
        self._exchange: Exchange | None = None
        self._body: Body | None = None  # None if the head of the response has not arrived
        self._chunks: ChunkedBody | None = None  # the body, if its chunks may pass as they are
        self._buffer = b""
        self._tunnel = False
        self._ends = False  # whether the replica closes the connection after this response
        self.closed = False
        self.idle_at = 0.0  # when the connection served its last exchange

    def begin(self, exchange: Exchange) -> None:
        """Send the request's head and the received bytes of its body."""
        self._exchange = exchange
        self._body = self._chunks = None
        exchange.replica = self.transport
        exchange.attempts += 1
        if not exchange.body_done or exchange.tells:
            exchange.sink.want_body()
        # counted first: if this process is killed here, no request of the replica is missing
        if not exchange.members:
            self.pool.work.count(exchange.key_id)
            if exchange.meter is not None:
                exchange.meter.begin(self.pool.work)
        else:
            for each in exchange.members:
                self.pool.work.count(each.key_id)
        self.transport.write(exchange.take_bytes())

    # Methods that the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's types have no common base

    def data_received(self, data: bytes) -> None:
        exchange, chunks = self._exchange, self._chunks
        if exchange is None:  # a response without a request: the connection cannot be trusted
            self.closed = True
            self.transport.abort()
        elif chunks is not None and chunks.is_whole_chunk(data):
            exchange.sink.pass_chunk(data)
        elif self._tunnel:
            exchange.sink.send(data, False)
        else:
            try:
                self._read(exchange, data)
            except HeadError as error:
                self._fail(exchange, error.what)

    def eof_received(self) -> bool:
        if self._tunnel and self._exchange is not None:
            self._exchange.sink.send(b"", True)
            return True
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        exchange = self._exchange
        if exchange is None:
            self.pool.forget(self)
        elif exchange.gone:  # the queue has closed the connection to cancel the request
            self._exchange = exchange.replica = None
            self.pool.end(exchange, Outcome.ABORTED)
        elif self._tunnel:
            self._exchange = None
            self.pool.release(exchange, None)
            exchange.sink.end()
        elif isinstance(self._body, OpenBody) and exc is None:
            exchange.sink.send(b"", True)
            self._finish(exchange, reusable=False)
        else:
            self._exchange = exchange.replica = None
            if self.idle_at:
                self.pool.hasty = True
            self.pool.end(exchange, Outcome.LOST)

    def pause_writing(self) -> None:
        if self._exchange is not None:
            self._exchange.sink.pause_body()

    def resume_writing(self) -> None:
        if self._exchange is not None:
            self._exchange.sink.resume_body()

    # the response

    def _read(self, exchange: Exchange, data: bytes) -> None:
        body = self._body
        if body is not None:
            payload = body.feed(data)
            if payload or body.done:
                if exchange.affinity is not None:
                    self._begin_body(exchange, body)
                exchange.sink.send(payload, body.done)
            if body.done and not exchange.gone:  # the sink may have aborted it
                self._finish(exchange, reusable=not (self._ends or body.rest))
            return
        if self._buffer:
            data = self._buffer + data
            self._buffer = b""
        while True:
            end = data.find(b"\r\n\r\n") + 4
            if end < 4:
                if len(data) > _HEAD_MAX:
                    raise HeadError(502, "the head of the response is too large")
                if not may_begin_response(data):
                    raise HeadError(502, "the head of the response is not valid HTTP/1.1")
                self._buffer = data
                return
            head = self.pool.owner.memo.parse_response(data[:end], exchange.head.method)
            if head.status >= 200 or head.status == 101:
                break
            if head.wide:
                head = guard(head, self.pool.owner.route, exchange.head)
            exchange.sink.send_interim(head)
            data = data[end:]
        self._begin_response(exchange, head, data[end:])

    def _begin_response(self, exchange: Exchange, head: ResponseHead, rest: bytes) -> None:
        route = self.pool.owner.route
        if head.wide or head.status in WITH_LOCATION:
            head = guard(head, route, exchange.head)
        if head.status == 101:
            if not exchange.head.upgrade:
                raise HeadError(502, "the replica changed the protocol without a request to do so")
            self._tunnel = exchange.responding = True
            exchange.sink.switch(head, rest)
            return
        body = None
        if head.length != len(rest):  # this is not the usual small response
            body = self._body = make_body(head.length)
            rest = body.feed(rest) if rest or not body.done else b""
        exchange.responding = True  # until here, an invalid response is answered with 502
        exchange.failed = head.status >= 500
        price = b""
        if route.price_header and not exchange.members:
            price = self.pool.price(exchange, monotonic())
        if body is None:
            exchange.sink.respond(head, rest, True, price)
            if not exchange.gone:
                self._finish(exchange, reusable=not head.close)
            return
        self._ends = head.close
        exchange.sink.respond(head, rest, body.done, price)
        # engines of models send the head before they compute anything
        if rest or exchange.affinity is None:
            self._begin_body(exchange, body)
        if body.done and not exchange.gone:
            self._finish(exchange, reusable=not (head.close or body.rest or head.length == 0))

    def _begin_body(self, exchange: Exchange, body: Body) -> None:
        if exchange.affinity is not None:
            exchange.affinity.answer(monotonic())
        if isinstance(body, ChunkedBody) and exchange.sink.passes_chunks:
            self._chunks = body

    def _finish(self, exchange: Exchange, reusable: bool) -> None:
        """Complete the response. If the replica responded before the request was complete, the
        connection cannot be used again."""
        self._exchange = exchange.replica = None
        if not (reusable and exchange.body_done) or self.closed:
            self.closed = True
            self.transport.abort()
            self.pool.release(exchange, None)
        else:
            self.pool.release(exchange, self)
        exchange.sink.end()

    def _fail(self, exchange: Exchange, what: str) -> None:
        self._exchange = exchange.replica = None
        self.closed = True
        self.transport.abort()
        self.pool.end(exchange, Outcome.INVALID, what)


class PoolOwner(Struct, frozen=True):
    """The queue of the pool's service. `settle` takes each exchange that has ended, with its slot;
    `update` is called when the replica can receive requests again.
    """

    route: ServiceRoute
    memo: HeadMemo
    settle: "Callable[[Exchange, ReplicaPool, Outcome, float, str], None]"
    update: "Callable[[ReplicaPool], None]"


Dial = Callable[[Callable[[], UpstreamConnection]], Awaitable[UpstreamConnection]]


class ReplicaPool:
    """One replica: its slots, which the queue assigns and frees, and its idle connections. `dial`
    opens connections in another way than to the address.
    """

    def __init__(
        self,
        address: ReplicaAddress,
        owner: "PoolOwner",
        work: ReplicaWork,
        dial: Dial | None = None,
    ) -> None:
        self.address = address
        self._dial = dial or self._connect_replica
        self.owner = owner
        self.concurrency = address.concurrency or owner.route.concurrency
        self.tier = 0  # what a replica that is farther away adds to its load
        self._places = frozenset(address.places)
        self.work = work
        self.batch_times = BatchTimes()
        self.in_flight = 0
        self.draining = False
        self.cooling = False
        # whether the replica has kept a connection open that was long unused, and whether it has
        # closed one that was not
        self._patient = self.hasty = False
        self.position = -1  # in the service's list
        self._idle: list[UpstreamConnection] = []
        self._connecting: set[asyncio.Task[None]] = set()
        self._backoff_s = _BACKOFF_S
        self._timer: asyncio.TimerHandle | None = None
        self._served = self._failed = 0
        self.state: ScoredReplica | None = None  # what the service's scorer knows of it

    def permits(self, exchange: Exchange) -> bool:
        """Return whether the exchange may be served by this replica, because the replica has all
        the places that the exchange requires, and what its affinity requires.
        """
        affinity = exchange.affinity
        if affinity is not None and not affinity.permits(self):
            return False
        return exchange.places <= self._places

    def lies_in(self, places: frozenset[str]) -> bool:
        """Return whether the replica is in all of these places."""
        return places <= self._places

    def start(self, exchange: Exchange) -> None:
        """Send the exchange, which has one of the slots, to the replica. If the replica has to be
        prepared for it, this is done first.
        """
        affinity = exchange.affinity
        if affinity is not None and not affinity.is_ready(self):
            self.spawn(self._prepare(exchange, affinity))
        else:
            self._send(exchange)

    async def _prepare(self, exchange: Exchange, affinity: RequestAffinity) -> None:
        try:
            await affinity.prepare(self)
        except UnpreparedError as error:
            self.end(exchange, Outcome.UNPREPARED, str(error))
            return
        except (OSError, TimeoutError):
            self._cool(exchange)
            return
        if exchange.gone:
            self.end(exchange, Outcome.UNSENT)
        else:
            self._send(exchange)

    def _send(self, exchange: Exchange) -> None:
        if (connection := self._take_idle(exchange)) is not None:
            connection.begin(exchange)
            return
        self.spawn(self._connect(exchange))

    def spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    def _take_idle(self, exchange: Exchange) -> UpstreamConnection | None:
        """Return an unused connection, or None if the exchange needs a new one: the second try of a
        request, or a request that must not be repeated and could be lost on a used connection.
        """
        if exchange.attempts:
            return None
        idle, now, repeatable = self._idle, exchange.started_at, exchange.can_retry()
        if not (repeatable or self._is_patient(now)):
            return None
        while idle:
            connection = idle.pop()
            if connection.closed:
                continue
            if repeatable or now - connection.idle_at < _FRESH_S:
                return connection
            connection.transport.close()
        return None

    def _is_patient(self, now: float) -> bool:
        """Return whether the replica is known to keep connections open that are unused for some
        time: the server has tried it, or the oldest unused connection shows it, because the newest
        ones are used first.
        """
        if not self._patient:
            idle = self._idle
            self._patient = self.address.keeps or bool(
                idle and now - idle[0].idle_at >= _PATIENCE_S
            )
        return self._patient and not self.hasty

    async def _connect(self, exchange: Exchange) -> None:
        try:
            async with asyncio.timeout(_CONNECT_S):
                connection = await self._dial(lambda: UpstreamConnection(self))
        except (OSError, TimeoutError):
            self._cool(exchange)
            return
        self._backoff_s = _BACKOFF_S
        if exchange.gone:
            connection.idle_at = monotonic()
            self._idle.append(connection)
            self.end(exchange, Outcome.UNSENT)
        else:
            connection.begin(exchange)

    async def _connect_replica(self, make: Callable[[], UpstreamConnection]) -> UpstreamConnection:
        """Raises OSError."""
        loop, address = asyncio.get_running_loop(), self.address
        return (await loop.create_connection(make, address.host, address.port))[1]

    def _cool(self, exchange: Exchange) -> None:
        """Try a replica that accepts no connections again later."""
        if self.state is not None:
            self.state.forget()
        if not self.cooling and not self.draining:
            self.cooling = True
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._backoff_s, self.warm)
            self._backoff_s = min(2 * self._backoff_s, _BACKOFF_MAX_S)
        self.end(exchange, Outcome.UNREACHABLE)

    def warm(self) -> None:
        """Mark the replica as available again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.cooling = False
        self.owner.update(self)

    def release(self, exchange: Exchange, connection: UpstreamConnection | None) -> None:
        """Release the connection after a complete response, and keep the connection open if it can
        be used again."""
        self._served += 1
        now = monotonic()
        if connection is not None:
            if self.draining or len(self._idle) >= self.concurrency:
                connection.transport.close()
            else:
                connection.idle_at = now
                self._idle.append(connection)
        self.owner.settle(exchange, self, Outcome.ANSWERED, now, "")

    def end(self, exchange: Exchange, outcome: Outcome, what: str = "") -> None:
        """Report the end of an exchange without a complete response. `what` says what is wrong with
        a response that is not valid.
        """
        self._failed += outcome not in _NO_FAILURES
        self.owner.settle(exchange, self, outcome, monotonic(), what)

    def price(self, exchange: Exchange, now: float) -> bytes:
        """If the service shows prices, return the header field that states the cost of the request
        so far; otherwise return b""."""
        if not self.owner.route.price_header:
            return b""
        share_s = self.work.share_s(exchange.work_mark, now, exchange.weight)
        return b"%b: %d\r\n" % (PRICE_FIELD, round(self.address.rate_micros * share_s / 3600))

    def forget(self, connection: UpstreamConnection) -> None:
        """Forget an idle connection that the replica has closed."""
        if connection in self._idle:
            self._idle.remove(connection)
            if self.state is not None:
                self.state.doubt()
            self.hasty = self.hasty or monotonic() - connection.idle_at < _PATIENCE_S

    def drain(self) -> None:
        """Accept no more requests; requests in flight finish."""
        self.draining = True
        if self._timer is not None:
            self._timer.cancel()
        for connection in self._idle:
            connection.transport.close()
        self._idle.clear()

    def describe(self) -> ReplicaFacts:
        return ReplicaFacts(
            id=self.address.id,
            in_flight=self.in_flight,
            served=self._served,
            failed=self._failed,
            draining=self.draining,
            adapters=tuple(self.state.loaded if self.state is not None else ()),
            loads=0 if self.state is None else self.state.loads,
        )

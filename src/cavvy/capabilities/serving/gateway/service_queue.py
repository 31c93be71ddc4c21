"""A service: its replicas, and the requests that wait for a replica, in the order of arrival.

A request waits while no replica is ready or all replicas are busy. A request is refused only if too
many requests wait already, or if its own time limit has passed.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from math import ceil, inf
from operator import add
from pathlib import Path
from time import monotonic, time

from cavvy.capabilities.serving.bills import KeyWork
from cavvy.capabilities.serving.gateway.balancing import (
    FARTHER,
    FULL,
    CanarySplit,
    choose_by_key,
    choose_least,
    make_ring,
)
from cavvy.capabilities.serving.gateway.batches import ServiceBatches, separate
from cavvy.capabilities.serving.gateway.client_keys import ServiceKeys, make_limits
from cavvy.capabilities.serving.gateway.config import ReplicaAddress, ServiceRoute
from cavvy.capabilities.serving.gateway.exchange import Exchange, Outcome, QueueEntry
from cavvy.capabilities.serving.gateway.extensions import (
    RoutedRequests,
    find_meters,
    find_scorer,
)
from cavvy.capabilities.serving.gateway.fair_order import FairOrder
from cavvy.capabilities.serving.gateway.heads import HeadMemo
from cavvy.capabilities.serving.gateway.kept_counts import KeptCounts
from cavvy.capabilities.serving.gateway.own_answers import AnswerCode, OwnAnswer
from cavvy.capabilities.serving.gateway.rates import ServiceRates
from cavvy.capabilities.serving.gateway.seams import ResponseMeter
from cavvy.capabilities.serving.gateway.statistics import (
    BatchFacts,
    BoundArrivals,
    ColdStarts,
    ReplicaFacts,
    ServiceCounters,
    ServiceFacts,
    WaitingLine,
    estimate_retry_s,
)
from cavvy.capabilities.serving.gateway.upstream import PoolOwner, ReplicaPool
from cavvy.capabilities.serving.gateway.work import ReplicaWork
from cavvy.capabilities.serving.loads import find_quantile, write_places
from cavvy.domain.ledger import TokenUse
from cavvy.domain.values import replace

_NO_SERVICE = OwnAnswer(404, AnswerCode.NO_SERVICE, "the service was removed")
_CANARY_OUTCOMES = (Outcome.LOST, Outcome.INVALID, Outcome.ABORTED)
_UNPREPARED_MAX = 2  # replicas that may fail to be prepared for a request
# a queue that is a little shorter than it could be costs no throughput
_MARGIN = 1.1
_ONE_TOKEN = TokenUse(prompt=1)  # a request without tokens counts as one
_GONE_MAX = 32  # replicas that were removed and whose work is still reported


class ServiceQueue:
    """The queue of one service, and its replicas. `wake` is called with the service's name when a
    request waits and the service has no replica.
    """

    _successor: "ServiceQueue | None" = None
    _removed = False
    _unbound = 0  # the number of waiting requests that any replica may get
    _turn = 0

    def __init__(
        self,
        route: ServiceRoute,
        memo: HeadMemo,
        wake: Callable[[str], None] = lambda name: None,
        kept: KeptCounts | None = None,
        state: Path | None = None,
    ) -> None:
        now = monotonic()
        self.route = route
        self._kept = KeptCounts() if kept is None else kept
        self._wake = wake
        self._late_s = inf if route.late_s is None else route.late_s
        self.slow_s = inf if route.slow_s is None else route.slow_s
        self.memo = memo
        limits, routing = memo.limits, route.routing
        self.meters = find_meters()(route, limits.hold_bytes, state)
        self.scorer = find_scorer()(self)
        reads = self.scorer.reads
        self.entry = QueueEntry(route, limits.replay_bytes, reads, self.enter, self.leave)
        self._owner = PoolOwner(route, memo, self.settle, self.update)
        self.keys = ServiceKeys(route.keys, route.keyed, now)
        self.rates = ServiceRates(route.rates)
        self.guarded = bool(self.keys or self.rates)
        # whether requests need nothing but a replica: `plain` until they are open, `_simple` then
        needs = self.guarded or route.closed or route.fallbacks or self.scorer.answers
        self.plain = not needs
        # tells the replica which part of the path it does not get
        removed = route.removed_prefix.encode()
        self.prefix_field = b"X-Forwarded-Prefix: %b\r\n" % removed if removed else b""
        self.counters = ServiceCounters(now)
        self.limits = make_limits(route.name, route.keys, self._kept, now)
        self._fair = make_order(route)
        self.canary = None if route.canary is None else CanarySplit(route.canary)
        self.batches: ServiceBatches | None = None
        if route.batch is not None:
            self.batches = ServiceBatches(
                route.batch, route, memo.limits.hold_bytes, self._dispatch
            )
        needed = self.limits or route.adapters or route.batch or route.canary or routing
        self._simple = not (needed or self.scorer.reads) and self._fair is None
        self._cold_starts = ColdStarts(route.cold_start_s)
        self._bound = BoundArrivals()
        self._replicas: list[ReplicaPool] = []
        self._draining: set[ReplicaPool] = set()
        # by position, the load of each replica and, unless a key decides, its tier; FULL: the
        # replica takes no more requests
        self._loads: list[int] = []
        self._ring = make_ring(())
        self._waiting: OrderedDict[Exchange, None] = OrderedDict()
        self._line = WaitingLine()
        self._by_key = routing is not None and routing.by != "cache"
        self._work: dict[str, ReplicaWork] = {}  # replicas by their ID
        self._gone_tokens = TokenUse()  # of replicas whose records were removed

    # what exchanges call

    @property
    def current(self) -> "ServiceQueue":
        """The queue of the service's newest route; a change of the route replaces the queue."""
        queue = self
        while queue._successor is not None:
            queue = queue._successor
        return queue

    def enter(self, exchange: Exchange) -> None:
        """Start the request, or queue it, as soon as the part of its body has arrived on which its
        batch and its replica depend.
        """
        if self._successor is not None:
            exchange.entry = self.current.entry
            exchange.entry.enter(exchange)
            return
        if self._simple and exchange.meter is None and exchange.affinity is None:
            exchange.admitted = True
        elif not self._prepare(exchange):
            return
        if self._removed:
            exchange.sink.answer(_NO_SERVICE)
            return
        self.counters.record_arrival(_count_tokens(exchange))
        if exchange.places:
            self._bound.add(exchange.places, exchange.arrived_at)
        else:
            self._bound.unbound_at = exchange.arrived_at
        if not self._unbound:
            position = self._choose(exchange)
            if position >= 0:
                pool = self._replicas[position]
                if self.batches is None or not self._is_early(exchange, pool):
                    self._start(exchange, pool, exchange.arrived_at)
                    return
        self._wait(exchange, exchange.arrived_at)
        if self.batches is not None and self._count_free():
            self._dispatch()  # the batch that waits for others may be large enough now

    def _prepare(self, exchange: Exchange) -> bool:
        """Find out what decides about the request and its replica. Return False if a part of this
        has not arrived yet, or if the request was refused.
        """
        if not self._is_read(exchange):
            return False
        if self.limits and self._refuse_tokens(exchange, exchange.meter):
            return False
        exchange.admitted = True
        if not self._removed and (refused := self.scorer.admit(exchange)) is not None:
            self.refuse()
            exchange.sink.answer(refused)
            return False
        self.scorer.bind(exchange)
        return True

    def leave(self, exchange: Exchange) -> None:
        """Forget a request whose client has disconnected. If a replica has the request, only the
        end of the connection can cancel it; the slot is free when the connection has ended.
        """
        queue = self.current
        queue.counters.aborted += 1
        if exchange.meter is not None:
            exchange.meter.close()
        queue._forget(exchange)
        carrier = exchange.carrier or exchange
        if carrier.members:
            if carrier.divides or carrier.list_present():
                return
            carrier.gone = True
        if carrier.replica is not None:
            carrier.replica.abort()

    def wait_again(self, exchange: Exchange) -> bool:
        """Let a request wait at the front of the queue, because no fallback has answered it. Return
        False if too many wait already, or if an update has removed the request's model.
        """
        if len(self._waiting) >= self.route.queue_max or self.scorer.admit(exchange) is not None:
            return False
        self.scorer.bind(exchange)
        self._requeue(exchange, monotonic())
        return True

    def _is_read(self, exchange: Exchange) -> bool:
        if self.batches is not None and not self.batches.is_read(exchange):
            return False
        if exchange.meter is not None and not exchange.meter.is_read():
            return False
        if self._by_key and self.route.routing is not None:
            exchange.find_key(self.route.routing)
        return self.scorer.read(exchange)

    def _refuse_tokens(self, exchange: Exchange, meter: ResponseMeter | None) -> bool:
        """Refuse a request that exceeds the tokens of its key; return whether it was refused."""
        limit = self.limits.get(exchange.key_id)
        if limit is None or meter is None:
            return False
        asked = meter.asked
        refused = limit.take(asked.prompt + asked.completion, exchange.arrived_at)
        if refused is None:
            meter.limit_by(limit)
            return False
        self.refuse()
        exchange.admitted = True
        exchange.sink.answer(refused)
        return True

    def may_stay(self, places: frozenset[str]) -> bool:
        """Return whether the service's route permits requests that require all of `places`."""
        return self.route.places is None or places.issubset(self.route.places)

    def refuse(self) -> None:
        """Refuse a request before it is admitted. The request does not count as an arrival, because
        clients without permission must not start replicas.
        """
        self.counters.refused += 1

    # what replicas call

    def settle(
        self, exchange: Exchange, pool: ReplicaPool, outcome: Outcome, now: float, what: str
    ) -> None:
        """Decide what follows after the end of an exchange, and give its slot to the first waiting
        request. `what` says what is wrong with a response that is not valid.
        """
        if outcome is Outcome.ANSWERED and not exchange.spoiled:
            self._record_answer(exchange, pool, now)
            self._free(pool, exchange, now)
            return
        if self.canary is not None and outcome in _CANARY_OUTCOMES:
            failed = exchange.failed or outcome is not Outcome.ABORTED
            self.canary.record(pool.address.canary, failed, now - exchange.started_at)
        if pool.state is not None:
            if exchange.affinity is not None and exchange.affinity.misses:
                pool.state.forget()
            elif outcome is Outcome.LOST:
                pool.state.doubt()
        self._free(pool, exchange, now)
        if outcome is Outcome.ANSWERED and exchange.meter is not None:
            exchange.meter.withdraw()
            self._requeue(exchange, now)
        elif outcome is Outcome.ANSWERED:
            self._requeue_spoiled(exchange)
        elif outcome is Outcome.LOST:
            self._repeat(exchange, pool, now)
        elif outcome is Outcome.INVALID:
            self._refuse_response(exchange, what)
        elif outcome is Outcome.UNREACHABLE and not exchange.gone:
            exchange.avoid = pool
            self._requeue(exchange, now)
        elif outcome is Outcome.UNPREPARED and not exchange.gone:
            self._try_another(exchange, pool, now, what)

    def _try_another(self, exchange: Exchange, pool: ReplicaPool, now: float, what: str) -> None:
        """Send the request to another replica, because this one cannot be prepared for it. If a
        second replica cannot be either, the request is to blame."""
        if (refused := self.scorer.admit(exchange)) is not None:  # an update has removed it
            exchange.sink.answer(refused)
            return
        exchange.unprepared += 1
        exchange.avoid = pool
        if exchange.unprepared < _UNPREPARED_MAX and self._avoids(exchange, pool):
            self._requeue(exchange, now)
            return
        self.counters.lost += 1
        exchange.sink.answer(OwnAnswer(502, AnswerCode.NO_ADAPTER, what))

    def update(self, pool: ReplicaPool) -> None:
        """Record that a replica can receive requests again, and start waiting requests."""
        if not pool.draining:
            self._set_load(pool)
            self._dispatch()

    def _record_answer(self, exchange: Exchange, pool: ReplicaPool, now: float) -> None:
        """Record a complete response of a replica."""
        taken_s = work_s = now - exchange.started_at
        tokens = _count_tokens(exchange)
        if self._simple and not exchange.members:
            if not exchange.failed:
                self._line.record(tokens, taken_s)
            arrived_at = exchange.arrived_at
            self.counters.record_answer(arrived_at, exchange.started_at, now, taken_s, tokens)
            self.counters.slow += now - arrived_at > self.slow_s
            return
        batches, members = self.batches, exchange.members
        if batches is None and not exchange.failed:
            self._line.record(tokens, taken_s)
        if batches is not None and not exchange.failed:
            if members:
                instances = sum(each.weight for each in members)
                work_s = batches.count_work_s(pool, instances, taken_s)
            elif exchange.part is not None:
                work_s = batches.count_work_s(pool, exchange.part.instances, taken_s)
        answered = exchange.list_present() if members else (exchange,)
        for each in answered:
            share_s = work_s / len(answered)
            size = tokens if each is exchange else _count_tokens(each)
            self.counters.record_answer(each.arrived_at, each.started_at, now, share_s, size)
            if now - each.arrived_at > self.slow_s:
                self.counters.slow += 1
        if self.canary is not None:
            self.canary.record(pool.address.canary, exchange.failed, taken_s)

    def _free(self, pool: ReplicaPool, exchange: Exchange, now: float) -> None:
        """Free a slot of the replica, and give the slot to the first waiting request."""
        self.counters.change_in_flight(-1, now, exchange.started_at)
        if self._simple and exchange.is_bare:
            pool.work.end(exchange.key_id, now)
        else:
            self._free_rest(pool, exchange, now)
        pool.in_flight -= 1
        if pool.draining:
            if not pool.in_flight:
                self._draining.discard(pool)
            return
        room = not pool.cooling and pool.in_flight < pool.concurrency
        waiting = self._find_waiting(pool) if self._waiting and room else None
        if waiting is None or self._is_early(waiting, pool):
            self._set_load(pool)
        else:
            self._start(self._take(waiting), pool, now)

    def _free_rest(self, pool: ReplicaPool, exchange: Exchange, now: float) -> None:
        """Free what the request has besides its slot: what its affinity holds, and limits."""
        if exchange.affinity is not None:
            exchange.affinity.end(pool)
        if not exchange.members:
            pool.work.end(exchange.key_id, now, exchange.weight)
        for each in exchange.members:
            pool.work.end(each.key_id, now, each.weight)
        for each in exchange.members or (exchange,):
            if (limit := each.limit or self.limits.get(each.key_id)) is not None:
                used_s = pool.work.share_s(each.work_mark, now, each.weight)
                limit.spend(pool.address.rate_micros * used_s / 3600, time())
            if self._fair is not None:
                used = _ONE_TOKEN if each.meter is None else each.meter.used
                self._fair.end(each.key_id, each.fair_cost, used.prompt, used.completion)

    def _requeue(self, exchange: Exchange, now: float) -> None:
        """Put a request back at the front of the queue, because no replica has received the
        request.
        """
        if exchange.members:
            for each in exchange.members:
                each.attempts -= 1
                each.avoid = exchange.avoid
            self._requeue_members(exchange, now)
            return
        position = self._choose(exchange)
        if position >= 0:
            self._start(exchange, self._replicas[position], now)
        else:
            self._wait(exchange, now, first=True)

    def _repeat(self, exchange: Exchange, pool: ReplicaPool, now: float) -> None:
        """Repeat a request whose connection to the replica has ended, if it may be repeated."""
        if exchange.members:
            for each in exchange.list_present():
                each.carrier = None
                self._repeat(each, pool, now)
            return
        if exchange.responding:
            self.counters.lost += 1
            exchange.sink.cut()
        elif exchange.can_retry():
            self.counters.retried += 1
            exchange.avoid = pool
            self._requeue(exchange, now)
        else:
            self.counters.lost += 1
            exchange.sink.answer(OwnAnswer(502, AnswerCode.LOST, _explain_loss(exchange)))

    def _requeue_spoiled(self, batch: Exchange) -> None:
        """Send the requests of a batch again, because the batch was answered with an error or its
        response could not be divided."""
        if self.batches is not None:
            self.batches.count_spoiled()
        for each in batch.members:
            each.attempts -= 1
        separate(batch)
        self._requeue_members(batch, monotonic())

    def _refuse_response(self, exchange: Exchange, what: str) -> None:
        if exchange.members:
            for each in exchange.list_present():
                self._refuse_response(each, what)
            return
        self.counters.lost += 1
        if exchange.responding:
            exchange.sink.cut()
        else:
            text = f"the replica's response cannot be passed on: {what}"
            exchange.sink.answer(OwnAnswer(502, AnswerCode.INVALID, text))

    # Methods that the control socket and the clock call

    def set_replicas(self, addresses: Iterable[ReplicaAddress]) -> None:
        """Replace the set of ready replicas. Requests in flight finish on their replicas."""
        kept = {_place(pool.address): pool for pool in self._replicas}
        pools = []
        for each in addresses:
            pool = kept.pop(_place(each), None)
            if pool is None:
                pool = ReplicaPool(each, self._owner, self.find_work(each.id))
                self.scorer.equip(pool)
            pool.address = each
            # a key's replica is chosen wherever it is
            pool.tier = 0 if self._by_key else _farness(pool)
            pools.append(pool)
        for pool in kept.values():
            pool.drain()
            if pool.in_flight:
                self._draining.add(pool)
        self._replicas = pools
        self._loads = [FULL] * len(pools)
        self._ring = make_ring([pool.address.id for pool in pools] if self._by_key else ())
        self.scorer.set_replicas(pools)
        self._turn = 0
        if self.canary is not None:
            self.canary.set_replicas([pool.address.canary for pool in pools])
        for position, pool in enumerate(pools):
            pool.position = position
            self._set_load(pool)
        if pools:
            self._cold_starts.end(monotonic())
        elif self._waiting:
            self._cold_starts.begin(monotonic())
        for pool in pools:
            if pool.cooling:
                pool.warm()
        self._dispatch()

    def adopt(self, old: "ServiceQueue") -> None:
        """Take over the replicas, requests and counters from `old`, the queue of this service's
        older route.
        """
        old._successor = self
        self.counters = old.counters
        self.meters.adopt(old.meters)
        self.scorer.adopt(old.scorer)
        self.keys.adopt(old.keys)
        self.rates.adopt(old.rates)
        if old.batches is not None:
            old.batches.close()
            if self.batches is not None:
                self.batches.adopt(old.batches)
        if old.canary is not None and self.route.canary == old.route.canary:
            self.canary = old.canary
        self._cold_starts = old._cold_starts
        self._bound = old._bound
        self._work, self._gone_tokens = old._work, old._gone_tokens
        self._waiting, self._unbound, self._line = old._waiting, old._unbound, old._line
        for key_id, limit in self.limits.items():
            if key_id in old.limits:
                limit.adopt(old.limits[key_id])
        if self._fair is not None:
            self._fair.adopt(old._fair, self._waiting)
        for exchange in tuple(self._waiting):
            exchange.entry = self.entry
            self._admit_again(exchange)
            if self.route.batch != old.route.batch:
                exchange.set_part(None)
        self._replicas, self._draining = old._replicas, old._draining
        for pool in (*self._replicas, *self._draining):
            pool.owner = self._owner
            pool.concurrency = pool.address.concurrency or self.route.concurrency
            self.scorer.equip(pool)
        if self.route.closed:
            self._answer_waiting(OwnAnswer(402, AnswerCode.BUDGET, self.route.closed))
        if self.route.failing and not self._replicas:
            self._wait_shorter(monotonic())
        self.set_replicas([pool.address for pool in self._replicas])

    def _wait_shorter(self, now: float) -> None:
        """Let the waiting requests wait no longer than those that arrive now."""
        loop = asyncio.get_running_loop()
        for exchange in self._waiting:
            if exchange.timer is not None:
                exchange.timer.cancel()
            left_s = max(self._find_left(exchange, now), 0)
            exchange.timer = loop.call_later(left_s, self._end_wait, exchange)

    def count_elsewhere(self, used: Mapping[str, tuple[int, int]]) -> None:
        """Count the tokens and micro-dollars of keys at other gateways."""
        for key_id, (tokens, micros) in used.items():
            if (limit := self.limits.get(key_id)) is not None:
                limit.count_elsewhere(tokens, micros, monotonic(), time())

    def resume_work(self) -> None:
        """Load the counts that the previous gateway process stored."""
        name, kept = self.route.name, self._kept
        tokens = kept.resume_tokens(name)
        self._work = {
            replica: ReplicaWork(kept, name, replica, counts, tokens.get(replica))
            for replica, counts in kept.resume(name).items()
        }

    def keep_work(self) -> None:
        """Store the replica time that each client's requests have used so far. Called once a
        second."""
        now = monotonic()
        for each in self._work.values():
            each.keep(now)

    def close(self) -> None:
        """Remove the service: waiting requests are refused, and requests in flight finish."""
        for each in self._work.values():
            each.forget()
        self._removed = True
        self._answer_waiting(_NO_SERVICE)
        self.set_replicas(())

    def _answer_waiting(self, answer: OwnAnswer) -> None:
        while self._waiting:
            exchange = self._take(next(iter(self._waiting)))
            exchange.sink.answer(answer)

    def count_idle(self, may_wait: bool = False) -> int:
        """Return how many requests of the lowest priority may enter now: as many as slots are free
        while no request waits, and one that wakes a service without replicas. If they may wait,
        because their deadline is near, as many as all slots wait.
        """
        if self.route.closed:
            return 0
        waiting = len(self._waiting)
        if may_wait:
            return max(1, sum(pool.concurrency for pool in self._replicas)) - waiting
        if not self._replicas:
            return int(not waiting)
        return 0 if waiting else self._count_free()

    def retry_s(self) -> int | None:
        """For Retry-After."""
        now = monotonic()
        counters = self.counters
        return estimate_retry_s(
            cold_start_s=self._cold_starts.estimate_s,
            waited_s=self._cold_starts.waited_s(now),
            ready=len(self._replicas),
            backlog=len(self._waiting) + counters.in_flight,
            slots=sum(pool.concurrency for pool in self._replicas),
            service_s=counters.service_s / max(counters.answered, 1),
        )

    def describe(self) -> ServiceFacts:
        now = monotonic()
        counters = self.counters
        counters.change_in_flight(0, now)
        return ServiceFacts(
            name=self.route.name,
            at_s=now,
            arrivals=counters.arrivals,
            answered=counters.answered,
            refused=counters.refused,
            lost=counters.lost,
            retried=counters.retried,
            aborted=counters.aborted,
            started=counters.started,
            late=counters.late,
            in_flight=counters.in_flight,
            in_flight_s=counters.in_flight * now - counters.starts_s,
            backlog=len(self._waiting),
            concurrency_s=counters.concurrency_s,
            waited_s=counters.waited_s,
            service_s=counters.service_s,
            cold_starts=self._cold_starts.count,
            cold_start_s=self._cold_starts.estimate_s,
            arrivals_per_s=counters.list_seconds(),
            latency_us=dict(counters.latency),
            p50_s=find_quantile(counters.latency, 0.5),
            p95_s=find_quantile(counters.latency, 0.95),
            p99_s=find_quantile(counters.latency, 0.99),
            keys_used=dict(self.keys.used),
            replicas=self._describe_replicas(),
            work=self._describe_work(now),
            epoch=self._kept.epoch,
            canary=None if self.canary is None else self.canary.describe(),
            slow=counters.slow,
            unserved=counters.unserved,
            shed=counters.shed,
            fallbacks=dict(counters.fallbacks),
            batches=self._describe_batches(),
            tokens=self.meters.describe(),
            prompts=counters.describe_prompts(),
            backlog_size=sum(map(_count_tokens, self._waiting)),
            places=self._bound.describe(each.places for each in self._waiting),
        )

    @property
    def routed(self) -> RoutedRequests | None:
        """Counts of what replicas got, or None if what they hold does not decide."""
        return self.scorer.routed

    def sum_tokens(self) -> TokenUse:
        """Return the tokens of all replicas and clients. The sum only grows."""
        known = (each.sum_tokens() for each in self._work.values())
        return reduce(lambda one, other: one.combine(add, other), known, self._gone_tokens)

    # inside

    def find_work(self, replica: str) -> ReplicaWork:
        """Return the work record of a replica. A replica keeps its work record if its address
        changes."""
        known = self._work.get(replica)
        if known is None:
            known = self._work[replica] = ReplicaWork(self._kept, self.route.name, replica)
            used = {pool.address.id for pool in (*self._replicas, *self._draining)}
            used |= {each.id for each in self.route.fallbacks}
            gone = [name for name in self._work if name not in used and name != replica]
            for name in gone[:-_GONE_MAX]:
                record = self._work.pop(name)
                self._gone_tokens = self._gone_tokens.combine(add, record.sum_tokens())
                record.forget()
        return known

    def _describe_batches(self) -> BatchFacts | None:
        return None if self.batches is None else self.batches.describe(self._replicas)

    def _describe_replicas(self) -> tuple[ReplicaFacts, ...]:
        return tuple(pool.describe() for pool in (*self._replicas, *self._draining))

    def _describe_work(self, now: float) -> dict[str, dict[str, KeyWork]]:
        return {name: dict(each.describe(now)) for name, each in self._work.items() if each}

    def _choose(self, exchange: Exchange) -> int:
        loads: Sequence[int] = self._loads
        if self._simple and not exchange.is_bound:
            self._turn = self._turn + 1 if self._turn + 1 < len(loads) else 0
            return choose_least(loads, self._turn)
        if exchange.avoid is not None:
            pairs = zip(loads, self._replicas, strict=True)
            loads = [FULL if self._avoids(exchange, pool) else load for load, pool in pairs]
        affinity = exchange.affinity
        if exchange.places or (affinity is not None and affinity.binds):
            pairs = zip(loads, self._replicas, strict=True)
            permitted = [load if pool.permits(exchange) else FULL for load, pool in pairs]
            if affinity and min(permitted, default=FULL) >= FULL > min(loads, default=FULL):
                affinity.make_way(self._replicas[choose_least(loads, 0)])
            loads = permitted
        if self.canary is not None:
            loads = self.canary.narrow(loads)
        if affinity is not None:
            chosen = self.scorer.choose(exchange, loads)
            if chosen is not None:
                return chosen
        if exchange.routing_key is not None and self.route.routing is not None and self._by_key:
            return choose_by_key(
                self._ring,
                exchange.routing_key,
                loads,
                self.counters.in_flight,
                self.route.routing.load_factor,
            )
        if self._by_key:  # this request has no key, so it goes to a near replica
            pairs = zip(loads, self._replicas, strict=True)
            loads = [load if load >= FULL else load + _farness(pool) for load, pool in pairs]
        self._turn = self._turn + 1 if self._turn + 1 < len(loads) else 0
        return choose_least(loads, self._turn)

    def _start(self, exchange: Exchange, pool: ReplicaPool, now: float) -> None:
        """Start the request, joined with other waiting requests if possible."""
        if self.batches is not None and exchange.part is not None:
            members = self.batches.choose(exchange, self._waiting, pool, self._count_free(), now)
            for each in members[1:]:
                self._count_start(self._take(each), pool, now)
            if len(members) > 1:
                self._count_start(exchange, pool, now)
                exchange = self.batches.join(members, pool)
                exchange.started_at = now
        if not exchange.members:
            self._count_start(exchange, pool, now)
        self.counters.change_in_flight(1, now, now)
        pool.in_flight += 1
        self._set_load(pool)
        if exchange.affinity is not None:
            self.scorer.begin(exchange, pool, now)
        pool.start(exchange)

    def _count_start(self, exchange: Exchange, pool: ReplicaPool, now: float) -> None:
        exchange.started_at = now
        self.counters.started += 1
        if self._fair is not None:
            exchange.fair_cost = self._fair.start(exchange.key_id, _count_tokens(exchange))
        exchange.work_mark = pool.work.begin(exchange.key_id, now, exchange.weight)
        if now - exchange.arrived_at > self._late_s:
            self.counters.late += 1

    def _admit_again(self, exchange: Exchange) -> None:
        """Find out again what a waiting request needs, because the service may have changed."""
        self._unbound -= not exchange.is_bound
        refused = self.scorer.admit(exchange)
        self._unbound += not exchange.is_bound
        if refused is not None:
            self._take(exchange).sink.answer(refused)

    def _is_early(self, exchange: Exchange, pool: ReplicaPool) -> bool:
        """Return whether the request should wait for more requests to form a batch."""
        if self.batches is None or exchange.part is None:
            return False
        return self.batches.is_early(exchange, self._waiting, pool, self._count_free())

    def _count_free(self) -> int:
        """Return the number of free slots of all replicas."""
        return sum(
            max(0, pool.concurrency - pool.in_flight) for pool in self._replicas if not pool.cooling
        )

    def _requeue_members(self, batch: Exchange, now: float) -> None:
        for each in reversed(batch.list_present()):
            each.carrier = None
            self._wait(each, now, first=True)
        self._dispatch()

    def _set_load(self, pool: ReplicaPool) -> None:
        full = pool.cooling or pool.in_flight >= pool.concurrency
        self._loads[pool.position] = FULL if full else pool.in_flight + pool.tier

    def _find_left(self, exchange: Exchange, now: float) -> float:
        """Return for how many seconds a request may still wait: not for long if replicas fail."""
        left_s = exchange.arrived_at + exchange.wait_s - now
        if self.route.failing and not self._replicas:
            return min(left_s, self.route.failing_s)
        return left_s

    def _wait(self, exchange: Exchange, now: float, first: bool = False) -> None:
        left_s = self._find_left(exchange, now)
        if not self._replicas:
            self._cold_starts.begin(now)
            if not self._waiting:
                self._wake(self.route.name)
        if not first and (refused := self._refuse_wait(exchange, left_s, now)):
            self._count_unserved()
            self.counters.shed += 1
            exchange.sink.answer(refused)
            return
        self._waiting[exchange] = None
        if not exchange.places:  # those that wait for another place are not ahead of others
            self._line.enter(_count_tokens(exchange))
        self._unbound += not exchange.is_bound
        if first:
            self._waiting.move_to_end(exchange, last=False)
        if self._fair is not None:
            self._fair.enter(exchange, first=first)
        loop = asyncio.get_running_loop()
        exchange.timer = loop.call_later(max(left_s, 0), self._end_wait, exchange)
        if not first and len(self._waiting) > self.route.queue_max:
            self._make_place(exchange)

    def _refuse_wait(self, exchange: Exchange, left_s: float, now: float) -> OwnAnswer | None:
        """Return the answer to a request that must not wait: too many wait already, or it would
        surely wait too long, also if all replicas that the service may have started now. For a
        request with a fallback, only the replicas count that are ready.
        """
        waiting, present = len(self._waiting), sum(pool.concurrency for pool in self._replicas)
        if waiting >= self.route.queue_max and self._find_lower(exchange) is None:
            text = f"{waiting} requests are already waiting for a replica"
            return OwnAnswer(429, AnswerCode.QUEUE_FULL, text, self.retry_s())
        if exchange.places:
            return None
        slots = present
        if exchange.guard is None:
            slots = 0 if self.route.slots_max is None else max(present, self.route.slots_max)
        share = 1.0 if self._fair is None else self._fair.share_ahead(exchange.key_id)
        if present:
            wait_s = self._line.predict_s(slots, share)
        else:
            wait_s = self._cold_starts.predict_s(now) if exchange.guard is not None else None
        if wait_s is None or wait_s * _MARGIN <= left_s:
            return None
        if exchange.guard is not None:
            text = f"no replica would be free within {left_s:.3g} s"
            return OwnAnswer(504, AnswerCode.TOO_LATE, text, max(1, ceil(wait_s)))
        text = f"the request would wait for about {wait_s:.3g} s, and may wait for {left_s:.3g} s"
        return OwnAnswer(429, AnswerCode.QUEUE_FULL, text, max(1, ceil(wait_s - left_s)))

    def _find_lower(self, exchange: Exchange) -> Exchange | None:
        """Return the waiting request that makes place for one of a key with a higher priority."""
        return None if self._fair is None else self._fair.find_lower(exchange.key_id)

    def _make_place(self, exchange: Exchange) -> None:
        """Refuse a waiting request of a key with a lower priority, because the queue is full."""
        lower = self._find_lower(exchange)
        if lower is not None:
            self._count_unserved()
            self.counters.shed += 1
            text = "a request of a key with a higher priority has its place in the full queue"
            answer = OwnAnswer(429, AnswerCode.QUEUE_FULL, text, self.retry_s())
            self._take(lower).sink.answer(answer)

    def _end_wait(self, exchange: Exchange) -> None:
        if self._forget(exchange):
            self._count_unserved()
            waited_s = min(monotonic() - exchange.arrived_at, exchange.wait_s)
            text = (
                f"no replica{_where(exchange)} was free within {waited_s:.3g} s"
                f"{self._explain(exchange)}"
            )
            exchange.sink.answer(OwnAnswer(504, AnswerCode.TOO_LATE, text, self.retry_s()))

    def _explain(self, exchange: Exchange) -> str:
        """Return why no replica is started in the places where the request must stay, or "" if a
        replica may be started there."""
        if self.route.failing and not self._replicas:
            return f": {self.route.failing}"
        if not exchange.places or write_places(exchange.places) not in self.route.full_places:
            return ""
        return ": the service has its maximum number of replicas, but none in the requested places"

    def _count_unserved(self) -> None:
        self.counters.refused += 1
        self.counters.unserved += 1

    def _find_waiting(self, pool: ReplicaPool) -> Exchange | None:
        """Return the first request that may be sent to this replica. A request that failed on this
        replica is skipped if another replica is permitted to serve the request. A request is always
        skipped if the replica is outside the places where the request must stay.
        """
        waiting = self._waiting if self._fair is None else self._fair.list_first()
        found = (each for each in waiting if pool.permits(each) and not self._avoids(each, pool))
        return self.scorer.pick(found, pool)

    def _avoids(self, exchange: Exchange, pool: ReplicaPool) -> bool:
        """Return whether the request failed on this replica but can be sent to another replica."""
        return exchange.avoid is pool and any(
            each is not pool and each.permits(exchange) for each in self._replicas
        )

    def _forget(self, exchange: Exchange) -> bool:
        """Remove a request from the waiting requests; return whether the request was waiting."""
        if exchange not in self._waiting:
            return False
        del self._waiting[exchange]
        if not exchange.places:
            self._line.leave(_count_tokens(exchange))
        if self._fair is not None:
            self._fair.leave(exchange)
        self._unbound -= not exchange.is_bound
        return True

    def _take(self, exchange: Exchange) -> Exchange:
        self._forget(exchange)
        if exchange.timer is not None:
            exchange.timer.cancel()
            exchange.timer = None
        return exchange

    def _dispatch(self) -> None:
        """Start waiting requests while a replica has room. If no replica with room is permitted to
        serve a waiting request, the requests behind that request are started first.
        """
        now = monotonic()
        waiting = list(self._waiting) if self._fair is None else self._fair.list_next()
        for exchange in waiting:
            if exchange not in self._waiting:
                continue  # the request is in the batch of an earlier one
            position = self._choose(exchange)
            if position < 0 and exchange.is_bound:
                continue
            if position < 0:
                return
            if self._is_early(exchange, self._replicas[position]):
                continue
            self._start(self._take(exchange), self._replicas[position], now)


def make_order(route: ServiceRoute) -> FairOrder[Exchange] | None:
    """Return the fair order of the keys of a language model, or of keys with priorities; None:
    requests start as they arrive."""
    priorities = {key.id: key.priority for key in route.keys}
    if len(priorities) < 2 or not (route.models or len(set(priorities.values())) > 1):
        return None
    return FairOrder({key.id: key.weight for key in route.keys}, priorities)


def _count_tokens(exchange: Exchange) -> int:
    """Return the tokens of a request's prompt, or 1 if it has none."""
    return 1 if exchange.meter is None else max(1, exchange.meter.asked.prompt)


def _explain_loss(exchange: Exchange) -> str:
    text = "the replica closed the connection without an answer"
    if exchange.repeatable:
        return text
    return f"{text}; the request was not repeated, because it may have had an effect"


def _place(address: ReplicaAddress) -> ReplicaAddress:
    """Return the address without what may change while requests are in flight."""
    return replace(address, rate_micros=0, tier=0, keeps=False)


def _farness(pool: ReplicaPool) -> int:
    return pool.address.tier * FARTHER


def _where(exchange: Exchange) -> str:
    return f" in {' and '.join(sorted(exchange.places))}" if exchange.places else ""

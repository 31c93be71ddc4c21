"""Chooses the replica for a request to a language model: the one that holds the response which the
request continues; else by what caches hold of its prompt and which adapters are loaded.
"""

import asyncio
import re
from collections.abc import Collection, Iterator, Sequence
from time import monotonic
from typing import cast
from urllib.parse import unquote_to_bytes

from cavvy.capabilities.language_models.adapters import (
    APIS,
    LoadTimes,
    ReplicaAdapters,
    choose_waiting,
    count_waits,
    write_fields,
)
from cavvy.capabilities.language_models.affinity import (
    ModelAffinity,
    find_affinity,
    get_adapters,
    make_affinity,
)
from cavvy.capabilities.language_models.cache_events import CacheChange, watch_events
from cavvy.capabilities.language_models.cache_routing import (
    CACHE_TOKENS,
    CacheRouter,
    RoutedPrompts,
)
from cavvy.capabilities.language_models.engine_calls import EngineState, watch_engine
from cavvy.capabilities.language_models.model_list import answer_models
from cavvy.capabilities.language_models.prompts import READ_BYTES, read_prompt
from cavvy.capabilities.language_models.response_holders import (
    UNREADABLE,
    ResponseHolders,
    find_holder,
)
from cavvy.capabilities.language_models.token_meter import EngineTerms
from cavvy.capabilities.serving.gateway.exchange import Exchange
from cavvy.capabilities.serving.gateway.extensions import ServiceScorer
from cavvy.capabilities.serving.gateway.own_answers import Answer, AnswerCode, OwnAnswer
from cavvy.capabilities.serving.gateway.seams import ClientRequest
from cavvy.capabilities.serving.gateway.service_queue import ServiceQueue
from cavvy.capabilities.serving.gateway.upstream import ReplicaPool

_LATE_MODEL = OwnAnswer(
    400,
    AnswerCode.BAD_REQUEST,
    f"the body's first {READ_BYTES} bytes have no `model`; move `model` to the start",
)
# routes of engines that change the adapters of all clients, or load files of the replica
_ADAPTER_ROUTE = re.compile(rb"(?i)^[^?]*lora[_-]adapter")
_SEEKING_MAX = 16  # requests whose responses are looked for at the same time


class ModelScorer(ServiceScorer):
    """The scorer of one service."""

    def __init__(self, queue: ServiceQueue) -> None:
        self._queue = queue
        self.route = route = queue.route
        self._terms, self._routing = route.adapters, route.routing
        self.reads = min(READ_BYTES, queue.memo.limits.hold_bytes) if route.reads_body else 0
        self.answers = self._terms is not None
        self.load_times = LoadTimes()
        self.caches: CacheRouter | None = None
        if self._routing is not None and self._routing.by == "cache":
            tokens = self._routing.cache_tokens or CACHE_TOKENS
            self.caches = CacheRouter(tokens, self._routing.shared)
        self._pools: Sequence[ReplicaPool] = ()
        self._seeking: set[asyncio.Task[None]] = set()

    @property
    def routed(self) -> RoutedPrompts | None:
        """The prompts that replicas got, or None if their caches do not decide."""
        return None if self.caches is None else self.caches.routed

    @property
    def _holders(self) -> ResponseHolders:
        return cast(EngineTerms, self._queue.meters).holders

    # what requests need

    def answer(self, request: ClientRequest) -> Answer | None:
        if self._terms is None:
            return None
        if _ADAPTER_ROUTE.search(unquote_to_bytes(request.below)):
            self._queue.refuse()
            return OwnAnswer(403, AnswerCode.BAD_REQUEST, "the gateway itself loads adapters")
        return answer_models(self.route, request.head, request.below)

    def read(self, exchange: Exchange) -> bool:
        if self.reads and not self._read_prompt(exchange):
            return False
        affinity = find_affinity(exchange)
        if affinity is None or not affinity.response_id:
            return True
        return not self._seeks(exchange, affinity)

    def _read_prompt(self, exchange: Exchange) -> bool:
        """Find the prompt by which the replica is chosen. Return False if this depends on a part of
        the body that has not arrived yet.
        """
        head, affinity = exchange.head, find_affinity(exchange)
        known = affinity is not None and affinity.prompt is not None
        if known or not head.length or head.upgrade:
            return True
        if (body := exchange.read_beginning()) is None:
            return False
        affinity, length = make_affinity(exchange), max(exchange.size, head.length)
        affinity.prompt = read_prompt(body, length, exchange.model or "")
        affinity.is_cut = not exchange.body_done or exchange.size > READ_BYTES
        if affinity.prompt is not None:
            exchange.model = affinity.prompt.model
        return True

    def admit(self, exchange: Exchange) -> OwnAnswer | None:
        """Find the adapter of a request among the service's models. Return the answer to a request
        whose model is unknown.
        """
        terms, model, affinity = self._terms, exchange.model, find_affinity(exchange)
        prompt = None
        if affinity is not None:
            affinity.adapter, exchange.fields, prompt = "", b"", affinity.prompt
        if terms is None:
            return None
        if not model:
            is_cut = affinity is not None and affinity.is_cut
            return _LATE_MODEL if prompt is not None and is_cut else None
        if model in terms.sources:
            if prompt is not None:  # the body is a JSON object
                exchange.fields = write_fields(terms, model)
            make_affinity(exchange).adapter = model if terms.api in APIS else ""
        elif model not in self.route.models and terms.api in APIS:
            text = f"the service has no model {model!r}; it has {', '.join(self.route.models[:5])}"
            more = len(self.route.models) - 5
            text += f" and {more} more" if more > 0 else ""
            return OwnAnswer(404, AnswerCode.NO_MODEL, text)
        return None

    # responses that replicas hold

    def bind(self, exchange: Exchange) -> None:
        """Find the replica that holds the response which the request continues or reads."""
        affinity = find_affinity(exchange)
        if affinity is None:
            return
        affinity.holder = None
        if affinity.response_id:
            holder = self._find_holder(affinity.response_id)
            if holder is not None and holder.lies_in(exchange.places):
                affinity.holder = holder

    def may_take(self, exchange: Exchange) -> bool:
        affinity = find_affinity(exchange)
        made = "" if affinity is None else affinity.response_id
        return not made or self.holds(made)

    def holds(self, response_id: str) -> bool:
        """Return whether a ready replica is known to hold the response."""
        return self._find_holder(response_id) is not None

    def _find_holder(self, response_id: str) -> ReplicaPool | None:
        name = self._holders.find(response_id)
        return next((pool for pool in self._pools if pool.address.id == name), None)

    def _may_continue(self, exchange: Exchange, response_id: str) -> bool:
        """Return whether the response belongs to the request's key. One that another gateway has
        passed on, so that its key is not known, may be another's if the service has several."""
        owns = self._holders.owns(exchange.key_id, response_id)
        return not cast(EngineTerms, self._queue.meters).shared if owns is None else owns

    def _seeks(self, exchange: Exchange, affinity: ModelAffinity) -> bool:
        """Return whether the request waits until the replicas have been asked which of them holds
        its response, because another gateway may have passed it on; or has its answer, because the
        response is another key's."""
        made = affinity.response_id
        if not self._may_continue(exchange, made):
            self._queue.refuse()
            exchange.sink.answer(_explain_response(made))
            return True
        if affinity.seeks is None:
            affinity.seeks = bool(
                self.route.models
                and len(self._pools) > 1
                and len(self._seeking) < _SEEKING_MAX
                and self._holders.find(made) is None
            )
            if affinity.seeks:
                task = asyncio.ensure_future(self._seek(exchange, affinity))
                self._seeking.add(task)
                task.add_done_callback(self._seeking.discard)
        return affinity.seeks

    async def _seek(self, exchange: Exchange, affinity: ModelAffinity) -> None:
        made = affinity.response_id
        holder = await find_holder([pool.address for pool in self._pools], made)
        if holder is not None:
            self._holders.add(made, holder, exchange.key_id)
        affinity.seeks = False
        if not exchange.gone:
            exchange.entry.enter(exchange)

    # replicas

    def equip(self, pool: ReplicaPool) -> None:
        """Let the replica load the adapters of the route on demand, and let its engine tell what
        the choice between replicas needs."""
        state = pool.state
        if not isinstance(state, ModelReplica):
            state = pool.state = ModelReplica(pool)
        state.equip(self)

    def set_replicas(self, pools: Sequence[ReplicaPool]) -> None:
        self._pools = pools
        if self.caches is not None:
            self.caches.set_replicas([pool.address.id for pool in pools])

    def choose(self, exchange: Exchange, loads: Sequence[int]) -> int | None:
        affinity = find_affinity(exchange)
        if affinity is None or affinity.prompt is None or self.caches is None:
            return None
        now = monotonic()
        waits_s: Sequence[float] = ()
        if affinity.adapter:
            adapters = [get_adapters(pool) for pool in self._pools]
            waits_s = count_waits(adapters, affinity.adapter, now)
        return self.caches.choose(affinity.prompt, loads, now, waits_s)

    def pick(self, waiting: Iterator[Exchange], pool: ReplicaPool) -> Exchange | None:
        adapters = get_adapters(pool)
        return (
            next(waiting, None)
            if adapters is None
            else choose_waiting(waiting, adapters, find_affinity)
        )

    def begin(self, exchange: Exchange, pool: ReplicaPool, now: float) -> None:
        affinity = find_affinity(exchange)
        assert affinity is not None
        if affinity.prompt is not None and self.caches is not None:
            affinity.visit = self.caches.begin(pool.position, affinity.prompt, now)
        if affinity.adapter and (adapters := get_adapters(pool)) is not None:
            adapters.begin(affinity.adapter, now)

    def adopt(self, old: "ModelScorer") -> None:
        self.load_times = old.load_times
        if self.caches is not None and self._routing == old._routing:
            self.caches = old.caches

    # what engines tell

    def tell(self, pool: ReplicaPool, state: EngineState) -> None:
        """Record what the engine of a replica has told."""
        routing = self._routing
        if self.caches is not None and routing is not None:
            tokens = state.cache_tokens if routing.cache_tokens is None else None
            # without other gateways, the difference would be requests that have just ended
            requests = state.requests if routing.shared else 0
            self.caches.tell(pool.address.id, requests, tokens)

    def change_cache(self, pool: ReplicaPool, change: CacheChange) -> None:
        """Record what the engine of a replica has published about its cache."""
        caches, routing = self.caches, self._routing
        if caches is None or routing is None:
            return
        if change.cleared:
            caches.clear(pool.address.id)
        if change.holds is not None and routing.cache_tokens is None:
            caches.measure(pool.address.id, change.holds)
        if change.stored:
            caches.store(pool.address.id, change.stored, monotonic())


class ModelReplica:
    """What is known of one replica (`serving.gateway.seams.ScoredReplica`)."""

    _scorer: ModelScorer  # of the service's newest route
    _watched = False

    def __init__(self, pool: ReplicaPool) -> None:
        self._pool = pool
        self.adapters: ReplicaAdapters | None = None  # if the replica loads them on demand

    def equip(self, scorer: ModelScorer) -> None:
        pool, terms = self._pool, scorer.route.adapters
        self._scorer = scorer
        if scorer.caches is not None and not self._watched and not pool.draining:
            self._watched = True
            pool.spawn(watch_engine(pool.address, self._is_shared, self._tell))
            if pool.address.events_port is not None:
                pool.spawn(watch_events(pool.address, self._is_used, self._change_cache))
        if terms is None or terms.api not in APIS:
            self.adapters = None
        elif self.adapters is None:
            self.adapters = ReplicaAdapters(terms, pool.address, scorer.load_times)
            pool.spawn(self.adapters.refresh())
        else:
            self.adapters.change(terms)

    @property
    def loaded(self) -> Collection[str]:
        return () if self.adapters is None else self.adapters.loaded

    @property
    def loads(self) -> int:
        return 0 if self.adapters is None else self.adapters.loads

    def doubt(self) -> None:
        if self.adapters is not None:
            self.adapters.doubt()

    def forget(self) -> None:
        if self.adapters is not None:
            self.adapters.forget()

    def _is_used(self) -> bool:
        return not self._pool.draining

    def _is_shared(self) -> bool | None:
        """Return whether other gateways use the replica; None: this one does not any longer."""
        routing = self._scorer.route.routing
        return None if self._pool.draining else routing is not None and routing.shared

    def _tell(self, state: EngineState) -> None:
        self._scorer.tell(self._pool, state)

    def _change_cache(self, change: CacheChange) -> None:
        self._scorer.change_cache(self._pool, change)


def _explain_response(response_id: str) -> OwnAnswer:
    text = f"the key has no response {response_id[:80]!r} here; send the whole conversation"
    if response_id == UNREADABLE:
        text = "the body is not JSON that the gateway can read, or too long to look for a response"
        return OwnAnswer(400, AnswerCode.BAD_REQUEST, text)
    return OwnAnswer(404, AnswerCode.NO_OBJECT, text)

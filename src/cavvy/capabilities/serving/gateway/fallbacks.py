"""Sends requests that a service's own replicas cannot answer in time to other services, or to APIs
in OpenAI's format.

A request goes to the next of its service's fallbacks if the queue is full, if it waited for
`fallback_s` or would wait longer, if its replica cannot be reached, or if the replica fails before
the response has begun: no request is repeated after its first byte. A request that a replica may
have got is repeated only if it is idempotent or metered, as those for language models are. The
fallbacks of a fallback are not used, so there are no loops. If no fallback answers, the client gets
the first problem. A request that continues or reads a response goes only to what has made it.

Nothing of the client but its JSON body reaches an API, and only a status, JSON or events come back:
no fields, redirects, cookies or refusals of Cavvy's own key. The gateway connects to addresses that
it has checked (ADR 0177), and never sends a request to an API that must stay in some place.
"""

import asyncio
import re
import ssl
from collections.abc import Callable, Mapping
from functools import lru_cache
from http import HTTPStatus
from time import monotonic, time
from urllib.parse import urlsplit

import msgspec

from cavvy.capabilities.serving.gateway.bodies import NO_JSON
from cavvy.capabilities.serving.gateway.config import FallbackTarget, ReplicaAddress, ServiceRoute
from cavvy.capabilities.serving.gateway.exchange import Exchange, Outcome
from cavvy.capabilities.serving.gateway.heads import HeadError, HeadMemo, ResponseHead
from cavvy.capabilities.serving.gateway.own_answers import SILENT, AnswerCode, OwnAnswer
from cavvy.capabilities.serving.gateway.rates import make_plain
from cavvy.capabilities.serving.gateway.seams import ClientRequest, PassingSink, ResponseSink
from cavvy.capabilities.serving.gateway.service_queue import ServiceQueue
from cavvy.capabilities.serving.gateway.upstream import PoolOwner, ReplicaPool, UpstreamConnection
from cavvy.domain.ledger import TokenUse
from cavvy.http_client import TargetDenied, list_allowed

SERVED_BY = b"Cavvy-Served-By"
# the gateway's own answers in place of which a fallback is tried
_BEFORE = frozenset({AnswerCode.QUEUE_FULL, AnswerCode.TOO_LATE})  # no replica got the request
_AFTER = frozenset({AnswerCode.LOST, AnswerCode.INVALID, AnswerCode.NO_ADAPTER})
_ROUTES = frozenset(
    b"/v1/" + each
    for each in (b"chat/completions", b"completions", b"embeddings", b"responses", b"rerank")
)
_PASSED = (400, 413, 415, 422)  # refusals of an API that concern the client's request
_MEDIA = re.compile(
    rb"\r\n(?i:content-type):[ \t]*((?i:application/(?:[a-z.-]+\+)?json|text/event-stream))[;\r]"
)
_CODED = re.compile(rb"\r\n(?i:content-encoding):[ \t]*(?!(?i:identity))[^\r]")
_PLAIN = re.compile(r"[!-~]{0,4096}")  # what the value of a field may contain
_ANSWER_MAX = 64 << 20  # bytes of the answer of an API
_IN_FLIGHT_MAX = 1000  # requests at an API
_TRUST_S = 600  # certificates of authorities are read again after this time
_MARK = b"cavvy-fallback"  # of requests to APIs: such a request gets no further fallback

Body = dict[str, msgspec.Raw]
_decode = msgspec.json.Decoder(Body).decode


class Fallbacks:
    """The fallbacks of all services. `find` returns a service by its ID."""

    def __init__(self, memo: HeadMemo, find: Callable[[str], ServiceQueue | None]) -> None:
        self._memo, self.find = memo, find
        self._apis: dict[tuple[str, FallbackTarget], ApiTarget] = {}
        # what the control socket gives; APIs with a credential are not used without it
        self.credentials: Mapping[str, str] = {}
        self.private_targets = ""

    def guard(self, exchange: Exchange, service: ServiceQueue, request: ClientRequest) -> None:
        """Let a request go to the fallbacks of its service."""
        if not request.head.upgrade and not request.head.get_header(_MARK):
            FallbackSink(exchange, service, request, self)

    def find_api(self, service: ServiceQueue, target: FallbackTarget) -> "ApiTarget":
        key = (service.route.name, target)
        known = self._apis.get(key)
        if known is None:
            known = self._apis[key] = ApiTarget(target, service, self._memo, self)
        return known

    def keep_only(self, services: Mapping[str, ServiceQueue]) -> None:
        """Forget the APIs that no service names any more. Requests in flight finish."""
        for name, target in list(self._apis):
            if name not in services or target not in services[name].route.fallbacks:
                self._apis.pop((name, target)).pool.drain()


class ApiTarget:
    """An API that answers requests of one service."""

    def __init__(
        self, target: FallbackTarget, service: ServiceQueue, memo: HeadMemo, owner: Fallbacks
    ) -> None:
        self.target = target
        self.meters = service.meters.derive(target.model)
        self._service, self._owner = service, owner
        parts = urlsplit(target.url)
        self._tls = parts.scheme == "https"
        self._host, self._path = parts.hostname or "", parts.path.encode()
        self._port = parts.port or (443 if self._tls else 80)
        self._authority = parts.netloc.encode()
        self._looking: asyncio.Task[list[str]] | None = None
        route = ServiceRoute(name=service.route.name, concurrency=_IN_FLIGHT_MAX)
        address = ReplicaAddress(id=target.id, host="api", port=self._port)
        work = service.current.find_work(target.id)
        owned = PoolOwner(route, memo, self._settle, lambda pool: None)
        self.pool = ReplicaPool(address, owned, work, dial=self._dial)

    def start(self, exchange: Exchange, path: bytes, body: Body) -> bool:
        """Send the request to the API; return False if the API cannot be used now."""
        pool, target, secret = self.pool, self.target, ""
        if pool.cooling or pool.in_flight >= _IN_FLIGHT_MAX:
            return False
        if target.credential:
            found = self._owner.credentials.get(target.credential)
            if found is None or not _PLAIN.fullmatch(found):
                return False
            secret = found
        data = msgspec.json.encode({**body, "model": target.model})
        exchange.out_head = b"".join(
            (
                b"POST %b%b HTTP/1.1\r\n" % (self._path, path.removeprefix(b"/v1")),
                b"Host: %b\r\nUser-Agent: cavvy\r\nAccept-Encoding: identity\r\n" % self._authority,
                b"Accept: application/json, text/event-stream\r\n%b: 1\r\n" % _MARK,
                b"Authorization: Bearer %b\r\n" % secret.encode() if secret else b"",
                b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(data),
            )
        )
        exchange.held, exchange.held_bytes = [data], len(data)
        exchange.started_at = now = monotonic()
        exchange.work_mark = pool.work.begin(exchange.key_id, now)
        pool.in_flight += 1
        pool.start(exchange)
        return True

    async def _dial(self, make: Callable[[], UpstreamConnection]) -> UpstreamConnection:
        """Connect to an address that may be called for users. Raises OSError."""
        loop = asyncio.get_running_loop()
        try:
            addresses = await self._look_up()
        except (TargetDenied, ValueError) as error:
            raise OSError(str(error)) from error
        tls = _make_tls(monotonic() // _TRUST_S) if self._tls else None
        name = self._host if self._tls else None
        problem = OSError("the API has no address")
        for each in addresses:
            try:
                found = await loop.create_connection(
                    make, each, self._port, ssl=tls, server_hostname=name
                )
            except OSError as error:  # also of TLS
                problem = error
            else:
                return found[1]
        raise problem

    async def _look_up(self) -> list[str]:
        """Return the addresses of the host. Connections that are opened together share a look-up,
        because those of a slow name server would otherwise occupy the threads of all services.
        Raises OSError, TargetDenied, ValueError.
        """
        if self._looking is None or self._looking.done():
            targets = self._owner.private_targets
            work = asyncio.to_thread(list_allowed, self._host, self._port, targets)
            self._looking = asyncio.create_task(work)
            self._looking.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(self._looking)

    def _settle(
        self, exchange: Exchange, pool: ReplicaPool, outcome: Outcome, now: float, what: str
    ) -> None:
        """Decide what follows after the end of an exchange with the API."""
        pool.in_flight -= 1
        pool.work.end(exchange.key_id, now)
        guard = exchange.guard
        assert isinstance(guard, FallbackSink)
        if outcome is Outcome.ANSWERED and exchange.spoiled and exchange.meter is not None:
            exchange.meter.withdraw()  # the API refused the question for its usage
            guard.repeat()
        elif outcome in (Outcome.LOST, Outcome.INVALID):
            guard.cut()
        elif outcome is Outcome.UNREACHABLE and not exchange.gone:
            guard.go_on()
        if exchange.meter is not None:
            self._spend(exchange.key_id, exchange.meter.used)

    def _spend(self, key_id: str, used: TokenUse) -> None:
        """Count the price of the answer in the limit of the client's key."""
        prices, limit = self.target.prices, self._service.current.limits.get(key_id)
        if prices is not None and limit is not None:
            limit.spend((used.prompt * prices[0] + used.completion * prices[1]) / 1e6, time())


class FallbackSink(PassingSink):
    """The receiver of the responses to one request, between replicas or APIs and the actual
    receiver `_sink`.
    """

    def __init__(
        self,
        exchange: Exchange,
        service: ServiceQueue,
        request: ClientRequest,
        fallbacks: Fallbacks,
    ) -> None:
        self._exchange, self._service, self._fallbacks = exchange, service, fallbacks
        self._sink: ResponseSink = exchange.sink
        self._path = make_plain(request.below).partition(b"?")[0]
        self._left = list(service.route.fallbacks)
        self._at: FallbackTarget | None = None  # the fallback that has the request
        self._api: ApiTarget | None = None  # if it is an API
        self._problem: OwnAnswer | None = None  # what the client gets if no fallback answers
        self._drops = False  # the response is not passed on
        self._size = 0  # bytes of the response
        self._responds = self._excused = self._shed = self._waits_on = False
        self._body: bytes | None = None  # as it was sent to the service
        self._out_head = b""
        self._model: str | None = None  # that the body names
        self._wait_s = exchange.wait_s
        exchange.sink = exchange.guard = self
        exchange.keep_bytes = exchange.entry.replay_bytes
        exchange.wait_s = min(exchange.wait_s, service.route.fallback_s)

    # what replicas, APIs and queues call

    @property
    def passes_chunks(self) -> bool:
        return not self._drops and self._api is None and self._sink.passes_chunks

    def respond(self, head: ResponseHead, payload: bytes, done: bool, more: bytes = b"") -> None:
        self._size = len(payload)
        if self._api is not None:
            passed = _filter(head)
            if passed is None:
                self._drop(done)
                return
            head, more = passed, b""
        elif head.status >= 500 and self._may_repeat() and any(map(self._may_use, self._left)):
            self._problem = self._problem or _say_status(head.status)
            self._drop(done)
            return
        if self._at is not None:
            more += b"%b: %b\r\n" % (SERVED_BY, self._at.label.encode())
        self._sink.respond(head, payload, done, more)
        exchange = self._exchange
        if not exchange.spoiled:  # otherwise, the meter has dropped the response
            self._count_answer()
            self._responds, self._body = True, None  # the body is not needed again
            exchange.held, exchange.held_bytes, exchange.keep_bytes = [], 0, 0

    def _count_answer(self) -> None:
        """Count the answer of a fallback."""
        if self._at is not None and not self._responds:
            counts = self._service.current.counters.fallbacks
            counts[self._at.id] = counts.get(self._at.id, 0) + 1

    def send(self, payload: bytes, done: bool) -> None:
        self._size += len(payload)
        replica = self._exchange.replica
        if self._is_too_long():
            if replica is not None:
                replica.abort()
        elif not self._drops:
            self._sink.send(payload, done)

    def send_interim(self, head: ResponseHead) -> None:
        if self._api is None:
            self._sink.send_interim(head)

    def answer(self, answer: OwnAnswer) -> None:
        is_own, code = self._at is None, answer.code
        if code in _BEFORE or (code in _AFTER and self._may_repeat()):
            self._problem = self._problem or answer
            is_shed = is_own and code is AnswerCode.QUEUE_FULL
            self._excuse(self._excused or (is_own and code in _BEFORE), shed=self._shed or is_shed)
            if self._try_next() or self._wait_on():
                return
        self._give_up(answer)

    def cut(self) -> None:
        if self._responds:
            self._sink.cut()
        else:
            self.go_on()

    def end(self) -> None:
        if self._drops:
            self.go_on()
        elif self._is_too_long():
            self._sink.cut()
        else:
            self._sink.end()

    # the fallbacks

    def go_on(self) -> None:
        """Try the next fallback, because what has the request cannot answer it."""
        if not (self._exchange.gone or self._try_next() or self._wait_on()):
            text = "neither the service nor its fallbacks can answer the request"
            self._give_up(OwnAnswer(502, AnswerCode.LOST, text))

    def silence(self) -> bool:
        """Try the next fallback, because the response does not begin in time. Return False if no
        replica or API has the request.
        """
        replica = self._exchange.replica
        if replica is None or self._responds:
            return False
        self._problem = self._problem or SILENT
        replica.abort()
        return True

    def repeat(self) -> None:
        """Send the request to the same fallback again."""
        self._body = None
        if self._at is not None:
            self._left.insert(0, self._at)
        self.go_on()

    def _is_too_long(self) -> bool:
        return self._api is not None and self._size > _ANSWER_MAX

    def _give_up(self, answer: OwnAnswer) -> None:
        self._excuse(False, shed=False)
        self._sink.answer(self._problem or answer)

    def _excuse(self, excused: bool, *, shed: bool) -> None:
        """Do not count the request as refused by its service while a fallback may answer it."""
        counters, more = self._service.current.counters, self._excused - excused
        counters.refused += more
        counters.unserved += more
        counters.shed += self._shed - shed
        self._excused, self._shed = excused, shed

    def _drop(self, done: bool) -> None:
        """Pass nothing of the response on, and end it."""
        self._drops = True
        if not done and self._exchange.replica is not None:
            self._exchange.replica.abort()

    def _may_repeat(self) -> bool:
        """Return whether a request that a replica may have got can be sent elsewhere."""
        exchange = self._exchange
        return not self._responds and (exchange.head.idempotent or exchange.meter is not None)

    def _wait_on(self) -> bool:
        """Let a request that no replica got wait for as long as it may without fallbacks. Return
        False if it must not wait.
        """
        exchange, service = self._exchange, self._service.current
        if not self._excused or self._waits_on:
            return False
        self._waits_on = True
        if exchange.arrived_at + self._wait_s <= monotonic():
            return False
        if self._body is not None:
            exchange.out_head, exchange.model = self._out_head, self._model
            exchange.replace_body(self._body)
        self._at = self._api = None
        self._reset(service)
        exchange.wait_s, exchange.admitted = self._wait_s, True
        if not service.wait_again(exchange):
            return False
        self._excused = self._shed = False  # the wait has not ended yet
        self._problem = None
        return True

    def _reset(self, service: ServiceQueue, model: str = "") -> None:
        """Let the request begin anew at a service, maybe with another model."""
        exchange, self._drops = self._exchange, False
        exchange.entry = service.entry
        exchange.responding = exchange.failed = exchange.spoiled = False
        exchange.attempts, exchange.avoid, exchange.unprepared = 0, None, 0
        if exchange.meter is not None:
            exchange.meter.move(service.meters, model)

    def _try_next(self) -> bool:
        """Send the request to the next fallback that takes it; return False if none does."""
        if self._body is None:
            try:
                self._body = self._exchange.read_body()
            except HeadError:
                return False
            if self._body is None:
                return False
            self._out_head = self._exchange.out_head
            self._model = self._model or self._exchange.model
        while self._left:
            target = self._left.pop(0)
            if self._may_use(target) and self._send(target, self._body):
                return True
        return False

    def _may_use(self, target: FallbackTarget) -> bool:
        exchange = self._exchange
        if target.service is not None:
            other = self._fallbacks.find(target.service)
            return other is not None and _may_take(other, self._service.route, target, exchange)
        if exchange.affinity is not None:
            api = self._fallbacks.find_api(self._service, target)
            if not api.meters.may_take(exchange):
                return False
        is_known = exchange.head.method == b"POST" and self._path in _ROUTES
        return is_known and not exchange.places and exchange.meter is not None

    def _send(self, target: FallbackTarget, body: bytes) -> bool:
        exchange, asked = self._exchange, None
        if target.model and (asked := _read(body)) is None:
            return False
        other = None if target.service is None else self._fallbacks.find(target.service)
        if other is None:
            return asked is not None and self._send_to_api(target, asked)
        exchange.model = target.model or self._model
        if asked is not None:
            body = msgspec.json.encode({**asked, "model": target.model})
        exchange.out_head = self._out_head
        exchange.replace_body(body)
        self._at, self._api = target, None
        waited_s = monotonic() - exchange.arrived_at
        own_s = self._service.route.fallback_s if self._left else other.route.wait_s
        exchange.wait_s = waited_s + min(own_s, other.route.wait_s)
        self._reset(other, target.model)
        exchange.admitted = False
        exchange.limit = exchange.limit or self._service.current.limits.get(exchange.key_id)
        other.entry.enter(exchange)
        return True

    def _send_to_api(self, target: FallbackTarget, asked: Body) -> bool:
        exchange, meter = self._exchange, self._exchange.meter
        assert meter is not None
        api = self._fallbacks.find_api(self._service, target)
        before = self._at, self._api
        self._at, self._api = target, api
        self._reset(self._service.current)
        meter.move(api.meters)
        exchange.admitted, exchange.fields = True, b""
        if exchange.affinity is not None:
            exchange.affinity.release()
        if api.start(exchange, self._path, asked):
            return True
        self._at, self._api = before
        return False


def _may_take(
    other: ServiceQueue, route: ServiceRoute, target: FallbackTarget, exchange: Exchange
) -> bool:
    """Return whether another service may answer the request of a service with this route."""
    theirs = other.route
    if exchange.affinity is not None and not other.scorer.may_take(exchange):
        return False
    if theirs.closed or theirs.project != route.project or theirs.batch is not None:
        return False
    return (target.stays or route.places is None) and other.may_stay(exchange.places)


def _read(body: bytes) -> Body | None:
    try:
        return _decode(body)
    except NO_JSON:
        return None


def _filter(head: ResponseHead) -> ResponseHead | None:
    """Return what a client may see of the head of an API's response, or None if the response is
    none to the client's request.
    """
    fields = head.fields
    media = _MEDIA.search(fields)
    if not (200 <= head.status < 300 or head.status in _PASSED) or media is None:
        return None
    if _CODED.search(fields):
        return None
    kept = ResponseHead(head.status, head.close)
    kept.length = head.length
    phrase = b"OK" if head.status < 300 else HTTPStatus(head.status).phrase.encode()
    form = head.status, phrase, media[1].lower()
    kept.fields = b"HTTP/1.1 %d %b\r\nContent-Type: %b\r\n" % form
    if head.length >= 0:
        kept.fields += b"Content-Length: %d\r\n" % head.length
    return kept


def _say_status(status: int) -> OwnAnswer:
    text = f"the replica answered with the status {status}, and no fallback answered"
    return OwnAnswer(502, AnswerCode.LOST, text)


@lru_cache(maxsize=1)
def _make_tls(when: float) -> ssl.SSLContext:
    """Return the context for connections to APIs. `when` limits the age of the authorities."""
    made = ssl.create_default_context()
    made.set_alpn_protocols(["http/1.1"])
    return made

"""Admits a request to a service whose route has been found, or says why not. The answer depends on
the page that sent the request, the request's key, the rate of requests, its size, and the places in
which it must stay.
"""

import time

from cavvy.capabilities.serving.gateway.config import GatewayConfig, RateLimit
from cavvy.capabilities.serving.gateway.deferred import (
    RESULTS,
    DeferredCalls,
    DeferredRequest,
    ResultRequest,
)
from cavvy.capabilities.serving.gateway.exchange import Exchange
from cavvy.capabilities.serving.gateway.extensions import UNCOUNTED
from cavvy.capabilities.serving.gateway.fallbacks import Fallbacks
from cavvy.capabilities.serving.gateway.heads import NO_LENGTH
from cavvy.capabilities.serving.gateway.other_origins import (
    is_preflight,
    may_call,
    write_permission,
)
from cavvy.capabilities.serving.gateway.own_answers import Answer, AnswerCode, OwnAnswer
from cavvy.capabilities.serving.gateway.seams import ClientRequest, OpenRequest
from cavvy.capabilities.serving.gateway.service_queue import ServiceQueue
from cavvy.capabilities.serving.gateway.traces import RequestTraces, TracedSink
from cavvy.domain.values import Struct


class Preferences(Struct, frozen=True, kw_only=True):
    respond_async: bool = False
    wait_s: int | None = None


_NO_PREFERENCES = Preferences()


class Admission:
    """Opens the requests of services."""

    def __init__(
        self,
        config: GatewayConfig,
        calls: DeferredCalls,
        fallbacks: Fallbacks,
        traces: RequestTraces | None,
    ) -> None:
        self._fallbacks = fallbacks
        self.names = tuple(each.lower() for each in config.names)  # public ones of the gateway
        self._scheme = b"http" if config.tls is None else b"https"
        self._behind_proxy = config.behind_proxy
        self._calls = calls
        self._traces = traces  # None: requests have no spans

    def open(self, request: ClientRequest, service: ServiceQueue) -> OpenRequest | Answer:
        """Return the open request, or the answer to a request that is not admitted."""
        if request.head.plain and service.plain and self._traces is None:
            return self._open_plain(request, service)
        return self._open_checked(request, service)

    def _open_checked(self, request: ClientRequest, service: ServiceQueue) -> OpenRequest | Answer:
        head, route = request.head, service.route
        is_of_page = head.origin or head.fetch_site
        if is_of_page and (answer := self._refuse_page(request, service)):
            return answer
        if service.guarded and (answer := _refuse_client(request, service)):
            return answer
        if answer := _refuse_request(request, service) or service.scorer.answer(request):
            return answer
        if request.below.startswith(RESULTS) and head.length == 0:
            call_id = request.below[len(RESULTS) :].decode()
            return ResultRequest(self._calls, request, service, call_id)
        if route.closed:
            service.refuse()
            return OwnAnswer(402, AnswerCode.BUDGET, route.closed)
        key_id = request.key_id
        places = service.keys.bind(head, key_id) if key_id else head.places
        if places and not service.may_stay(places):
            return _refuse_residency(service, places)
        preferences = read_prefer(head.prefer) if head.prefer else _NO_PREFERENCES
        about = self._describe_client(request, service)
        if preferences.respond_async and not head.upgrade:
            about += service.keys.write_residency(key_id)
            return DeferredRequest(self._calls, request, service, about)
        if head.length == NO_LENGTH:
            about += b"Transfer-Encoding: chunked\r\n"
        if head.upgrade:
            about += b"Connection: upgrade\r\nUpgrade: %b\r\n" % head.upgrade
        exchange = self._make_exchange(request, service, about)
        exchange.model = request.model
        if key_id:
            exchange.key_id = key_id
            exchange.places = places
        if preferences.wait_s is not None:
            exchange.wait_s = min(preferences.wait_s, route.wait_s)
        self._add_sinks(exchange, request, service)
        return exchange

    def _open_plain(self, request: ClientRequest, service: ServiceQueue) -> OpenRequest | Answer:
        """Open a request that needs nothing of what a client or a service can ask for."""
        head = request.head
        if head.length > service.route.body_max or request.below.startswith(RESULTS):
            return self._open_checked(request, service)
        out_head = (
            b"%b %b HTTP/1.1\r\n%bX-Request-Id: %b\r\nX-Forwarded-Proto: %b\r\n"
            b"X-Forwarded-For: %b\r\n%b%b\r\n"
        ) % (
            head.method,
            request.target,
            head.fields,
            request.id,
            self._scheme,
            request.client,
            service.prefix_field,
            b"Transfer-Encoding: chunked\r\n" if head.length == NO_LENGTH else b"",
        )
        exchange = Exchange(request.sink, service.entry, head, out_head, request.arrived_at)
        if request.model:
            exchange.model = request.model
        service.meters.open(exchange, request.below, request.model)
        return exchange

    def _make_exchange(
        self, request: ClientRequest, service: ServiceQueue, about: bytes
    ) -> Exchange:
        """Return the exchange of the request, with the fields `about` for the replica."""
        head, sink, fields = request.head, request.sink, request.head.fields
        span = None if self._traces is None else self._traces.begin(request, service)
        if span is not None:
            sink, fields = TracedSink(sink, span), span.strip(head) + span.field
        out_head = b"%b %b HTTP/1.1\r\n%bX-Request-Id: %b\r\n%b\r\n" % (
            head.method,
            request.target,
            fields,
            request.id,
            about,
        )
        exchange = Exchange(sink, service.entry, head, out_head, request.arrived_at)
        if span is not None:
            span.exchange, exchange.span = exchange, span
        return exchange

    def _add_sinks(self, exchange: Exchange, request: ClientRequest, service: ServiceQueue) -> None:
        """Let the response pass what counts it, and what replaces a failed response."""
        service.meters.open(exchange, request.below, request.model)
        if service.route.fallbacks:
            self._fallbacks.guard(exchange, service, request)

    def _refuse_page(self, request: ClientRequest, service: ServiceQueue) -> Answer | None:
        """Return the answer to the page of a browser that may not call the service, or that only
        asks for this permission. Otherwise, return None.
        """
        head, keyed = request.head, bool(service.keys)
        request.shares = False
        if not may_call(head, service.route, keyed, self.names):
            service.refuse()
            origin = head.origin.decode("latin-1") or "another site"
            text = (
                f"a page of {origin} may not call this service; to permit it, add its origin to "
                "`origins` in the service's file"
            )
            return OwnAnswer(403, AnswerCode.OTHER_ORIGIN, text)
        if service.route.origins and not keyed and is_preflight(head):
            return write_permission(head)
        request.shares = bool(head.origin and (keyed or service.route.origins))
        return None

    def _describe_client(self, request: ClientRequest, service: ServiceQueue) -> bytes:
        """Return the header fields that inform the replica about the client and its connection, and
        about the part of the path that the gateway removed.
        """
        head, scheme, addresses = request.head, self._scheme, request.head.forwarded_for
        if self._behind_proxy and addresses:
            scheme = head.forwarded_proto or scheme
        else:
            addresses = addresses + b", " + request.client if addresses else request.client
        fields = b"X-Forwarded-Proto: %b\r\nX-Forwarded-For: %b\r\n%b" % (
            scheme,
            addresses,
            service.prefix_field,
        )
        if head.authorization or head.api_key:
            fields += _list_credentials(request, service)
        return fields


def _refuse_client(request: ClientRequest, service: ServiceQueue) -> Answer | None:
    """Return the answer to a request without a key or above a rate, or None. The request gets the
    ID of its key.
    """
    head, key_id = request.head, ""
    if service.keys:
        key = service.keys.find(head, time.time())
        if key is None and is_preflight(head):
            request.shares = False  # the permission is written already
            return write_permission(head)
        if key is None:
            service.refuse()
            return OwnAnswer(401, AnswerCode.NO_KEY, "the service needs one of its keys")
        request.key_id = key_id = key.id
        if wait_s := service.keys.wait_s(key, request.arrived_at):
            text = f"the key {key_id} may make {key.per_s:g} requests a second"
            return _refuse_rate(service, text, wait_s)
        if key.tokens_per_min is not None and not service.meters.counts_tokens:
            service.refuse()
            text = f"the key {key_id} may use so many tokens a minute, and {UNCOUNTED}"
            return OwnAnswer(501, AnswerCode.NO_TOKENS, text)
        limit = service.limits.get(key_id)
        if limit is not None and (refused := limit.refuse_spent(time.time())):
            service.refuse()
            return refused
    if service.rates:
        client, now = request.client, request.arrived_at
        if full := service.rates.take(head, request.below, key_id, client, now):
            return _refuse_rate(service, _describe_limit(full[0]), full[1])
    return None


def _refuse_rate(service: ServiceQueue, text: str, wait_s: int) -> OwnAnswer:
    service.refuse()
    return OwnAnswer(429, AnswerCode.TOO_MANY, text, wait_s)


def _describe_limit(limit: RateLimit) -> str:
    whose = {
        "client": "each client may make",
        "address": "each address may make",
        "header": f"requests with the same {limit.header} may be",
        "service": "the service takes",
    }[limit.each]
    below = f" for paths below {limit.prefix}" if limit.prefix else ""
    return f"{whose} {limit.per_s:g} requests a second{below}"


def _refuse_request(request: ClientRequest, service: ServiceQueue) -> OwnAnswer | None:
    """Return the answer to a request that no client may make, or None."""
    route = service.route
    if request.head.length > route.body_max:
        service.refuse()
        text = f"the request's body is too large; the limit is {route.body_max} bytes"
        return OwnAnswer(413, AnswerCode.TOO_LARGE, text)
    return None


def _refuse_residency(service: ServiceQueue, places: frozenset[str]) -> OwnAnswer:
    """Refuse a request because the service's replicas cannot run in all places in which the request
    must stay.
    """
    service.refuse()
    never = " and ".join(sorted(places.difference(service.route.places or ())))
    text = f"the service has no replicas in {never}, and the request must stay there"
    return OwnAnswer(403, AnswerCode.RESIDENCY, text)


def _list_credentials(request: ClientRequest, service: ServiceQueue) -> bytes:
    """Return the header fields that contain the client's credentials and are passed on to the
    replica. The fields are not passed on if the service has keys, because the fields could contain
    these keys. A key of another service and Cavvy's own tokens are never passed on: the client may
    have sent them to the wrong service, or the gateway may have chosen this service by the
    request's model.
    """
    fields, head, own = b"", request.head, service.memo.own
    if not service.keys:
        if head.authorization and not own.holds(head.authorization):
            fields = b"Authorization: %b\r\n" % head.authorization
        if head.api_key and not own.holds(head.api_key):
            fields += b"X-API-Key: %b\r\n" % head.api_key
    return fields


def read_prefer(value: bytes) -> Preferences:
    """Read the preferences. Unknown and invalid preferences are ignored, as RFC 7240 requires."""
    respond_async = False
    wait_s = None
    for part in value.split(b","):
        name, _, rest = part.partition(b";")[0].partition(b"=")
        name = name.strip(b" \t").lower()
        if name == b"respond-async":
            respond_async = True
        elif name == b"wait":
            digits = rest.strip(b' \t"')
            if digits.isdigit() and len(digits) < 7 and wait_s is None:
                wait_s = int(digits)
    return Preferences(respond_async=respond_async, wait_s=wait_s)

"""A service as the gateway sees it: its path, its clients and its limits."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Literal, get_args

import msgspec

from cavvy.capabilities.serving.bills import name_api
from cavvy.capabilities.serving.decide.replica_groups import count_room
from cavvy.capabilities.serving.decide.service import is_canary, state_of
from cavvy.capabilities.serving.decide.traffic import make_terms
from cavvy.capabilities.serving.decide.update import MOST_FAILURES, as_revision
from cavvy.capabilities.serving.gateway.config import (
    AdapterApi,
    AdapterTerms,
    BatchTerms,
    CanaryShare,
    ClientKey,
    FallbackTarget,
    RateLimit,
    ReplicaAddress,
    RoutingTerms,
    ServiceRoute,
)
from cavvy.capabilities.serving.replicas import ServiceReplica
from cavvy.capabilities.serving.stored_services import KeyPriority, ServiceKey, StoredService
from cavvy.control.decide.task_places import is_bound_to_places, list_possible_places, stays_within
from cavvy.domain.services import (
    AdapterRule,
    BatchRule,
    ReplicaRole,
    RequestRate,
    RoutingKind,
    RoutingRule,
)
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.values import replace

_MIB = 1 << 20
_CLOSED = "the budget of this service is spent for this month"
QUEUE_KEY = "queue"  # the ID of the key of queued calls
_ROUTING: Mapping[RoutingKind, Literal["cache", "header", "session"]] = {
    RoutingKind.CACHE: "cache",
    RoutingKind.HEADER: "header",
    RoutingKind.SESSION: "session",
}
_ADAPTERS: Mapping[str, AdapterApi] = {each: each for each in get_args(AdapterApi)}
_log = logging.getLogger(__name__)


def list_routes(
    services: Iterable[StoredService],
    hash_key: Callable[[str], str] = lambda service_id: "",
    shared: bool = False,
) -> tuple[ServiceRoute, ...]:
    """Return the routes of all services. The gateway refuses all routes if one route is unusable,
    so a service whose route is unusable is closed. Two simultaneous requests can create two
    services with the same host name; the older service keeps the name. `hash_key` returns the
    SHA-256 of the key with which queued calls to a service are sent, or "" if no such key exists.
    `shared` means that gateways of other servers have the same services.
    """
    found: list[ServiceRoute] = []
    taken: set[str] = set()
    services = sorted(services, key=lambda each: (each.created_at, each.id))
    others = {(each.project, each.name): each for each in services}
    for service in services:
        route = make_route(service, hash_key(service.id), shared, others)
        own = tuple(each for each in route.hosts if each.lower() not in taken)
        taken.update(each.lower() for each in own)
        if own != route.hosts:
            route = replace(route, hosts=own, prefix="" if own else service.path)
        found.append(_check(service, route))
    return tuple(found)


def _check(service: StoredService, route: ServiceRoute) -> ServiceRoute:
    try:
        return msgspec.json.decode(msgspec.json.encode(route), type=ServiceRoute)
    except msgspec.ValidationError as error:
        extra = {"service": service.name, "project": service.project}
        _log.error("the gateway cannot serve a service: %s", error, extra=extra)
        return ServiceRoute(
            name=service.id, project=service.project, prefix=service.path, keyed=True
        )


def make_route(
    service: StoredService,
    queue_key: str = "",
    shared: bool = False,
    others: Mapping[tuple[str, str], StoredService] = MappingProxyType({}),
) -> ServiceRoute:
    """Return the route of a service. `others` are the services to which its requests may go, by
    project and name.
    """
    spec = service.spec
    canary = None
    if is_canary(service):
        tried = as_revision(service, service.tried)
        canary = CanaryShare(revision=service.tried, percent=tried.spec.update.weight)
    keys = _make_keys(service, queue_key)
    return ServiceRoute(
        name=service.id,
        label=service.name,
        project=service.project,
        hosts=spec.hosts,
        prefix="" if spec.hosts else service.path,
        strip_prefix=spec.strip_prefix,
        concurrency=spec.concurrency,
        queue_max=spec.limits.waiting,
        wait_s=spec.timeouts.queue.total_seconds(),
        failing=_explain_failures(service),
        slots_max=_count_slots(service.task),
        response_s=spec.timeouts.response.total_seconds(),
        silence_s=spec.timeouts.silence.total_seconds(),
        late_s=make_terms(spec).wait_s,
        slow_s=None if spec.slo.p95 is None else spec.slo.p95.total_seconds(),
        ttft_s=None if spec.slo.ttft is None else spec.slo.ttft.limit_s,
        token_gap_s=None if spec.slo.token_gap is None else spec.slo.token_gap.limit_s,
        models=spec.model_names,
        adapters=None if spec.adapters is None else _make_adapters(spec.adapters),
        places=list_possible_places(service.task),
        full_places=tuple(each.places for each in service.unplaced),
        keyed=spec.keys,
        keys=keys if spec.keys else (),
        origins=spec.origins,
        rates=tuple(_make_rate(each) for each in spec.rates),
        body_max=spec.limits.body_mib * _MIB,
        batch=None if spec.batch is None else _make_batch(spec.batch),
        routing=_make_routing(spec.routing, shared),
        fallbacks=tuple(_list_fallbacks(service, others)),
        fallback_s=spec.timeouts.fallback.total_seconds(),
        canary=canary,
        closed=_CLOSED if service.stopped_by else "",
        price_header=spec.price_header,
    )


def _explain_failures(service: StoredService) -> str:
    """Return why replicas end before they are ready, "" if they do not: callers get the reason."""
    if service.failures < MOST_FAILURES or state_of(service) != "failing":
        return ""
    return (
        f"its replicas end before they are ready: {service.problem}; "
        f"`cavvy logs {service.name}` shows what they print"
    )


def _count_slots(task: TaskSpec) -> int:
    """Return how many requests all replicas may have that the service may have. Of groups behind a
    router, this is more than the gateway sends at the same time.
    """
    assert task.service is not None
    usual = task.service.concurrency
    groups = [each for each in task.replica_groups if each.role is not ReplicaRole.ROUTER]
    if not groups:
        return task.service.replicas.most * usual
    return sum(each.replicas.most * (each.concurrency or usual) for each in groups)


def make_address(
    service: StoredService, replica: ServiceReplica, port: int, tier: int, events_port: int = 0
) -> ReplicaAddress:
    """Return the address of a replica whose relay listens on a port of this machine, and on another
    one for its events, if this is not 0."""
    tried, alone = replica.revision == service.tried, as_revision(service, replica.revision)
    most = alone.spec.concurrency if tried else None
    return ReplicaAddress(
        id=replica.id,
        host="127.0.0.1",
        port=port,
        events_port=events_port or None,
        concurrency=most if replica.role is None else count_room(alone, replica),
        rate_micros=replica.rate.micros_per_hour,
        canary=tried,
        tier=tier,
        places=replica.places,
    )


def _list_fallbacks(
    service: StoredService, others: Mapping[tuple[str, str], StoredService]
) -> Iterator[FallbackTarget]:
    """Yield the fallbacks that exist and that the service's places permit."""
    bound = is_bound_to_places(service.task)
    for each in service.spec.fallbacks:
        api, other = each.api, others.get((service.project, each.service))
        if api is not None and not bound:
            yield FallbackTarget(
                id=name_api(api.url, api.model),
                label=api.host,
                url=api.url,
                model=api.model,
                credential=name_credential(service.project, api.secret),
                prices=api.prices,
            )
        elif other is not None:
            yield FallbackTarget(
                id=other.id,
                label=each.service,
                service=other.id,
                model=each.model,
                stays=stays_within(other.task, service.task),
            )


def name_credential(project: str, secret: str | None) -> str:
    """Return the name of an API's key, which is "" if no secret is named."""
    return f"{project}/{secret or ''}"


def _make_keys(service: StoredService, queue_key: str) -> tuple[ClientKey, ...]:
    own = tuple(_make_key(each) for each in service.keys)
    return (*own, ClientKey(id=QUEUE_KEY, sha256=queue_key)) if queue_key else own


def _make_batch(rule: BatchRule) -> BatchTerms:
    return BatchTerms(
        max=rule.most, wait_s=rule.wait.total_seconds(), input=rule.input, output=rule.output
    )


def _make_adapters(rule: AdapterRule) -> AdapterTerms:
    return AdapterTerms(api=_ADAPTERS[rule.engine], sources=rule.sources, slots=rule.slots)


def _make_routing(rule: RoutingRule | None, shared: bool) -> RoutingTerms | None:
    if rule is None or rule.by is RoutingKind.LOAD:
        return None
    terms = RoutingTerms(by=_ROUTING[rule.by], shared=shared)
    if rule.header is not None:
        return replace(terms, header=rule.header.lower())
    return terms if rule.cache_tokens is None else replace(terms, cache_tokens=rule.cache_tokens)


def _make_key(key: ServiceKey) -> ClientKey:
    return ClientKey(
        id=key.id,
        sha256=key.sha256,
        per_s=key.per_s,
        burst=key.burst,
        tokens_per_min=key.tokens_per_min,
        micros_per_day=key.micros_per_day,
        weight=key.weight,
        priority=list(KeyPriority).index(key.priority),
        residency=key.residency,
        expires_at=None if key.expires_at is None else key.expires_at.timestamp(),
    )


def _make_rate(rate: RequestRate) -> RateLimit:
    limit = RateLimit(per_s=rate.per_s, burst=rate.burst, each=rate.each.value, prefix=rate.prefix)
    if rate.header is None:
        return limit
    return replace(limit, header=rate.header.lower())

"""Describes the service of a task in plain words."""

from collections.abc import Iterator, Sequence
from textwrap import shorten
from typing import assert_never

from cavvy.domain.services import (
    AdapterRule,
    BatchRule,
    CronTrigger,
    EdgeRule,
    EventTrigger,
    FallbackRule,
    QueueTerms,
    RateScope,
    ReplicaCount,
    ReplicaRole,
    RequestLimits,
    RequestRate,
    RoutingKind,
    RoutingRule,
    ServiceSpec,
    ServiceUpdate,
    TargetKind,
    UpdateStrategy,
)
from cavvy.domain.tasks import ReplicaGroup
from cavvy.domain.units import (
    Money,
    format_count,
    format_duration,
    format_memory,
    format_rate,
    format_usd,
)
from cavvy.spec.problems import listed


def describe_service(
    service: ServiceSpec, groups: Sequence[ReplicaGroup] = (), needs: Sequence[str] = ()
) -> Iterator[tuple[str, str]]:
    """Yield the description as rows of name and text. `needs` says what nodes each of the `groups`
    has."""
    probe = service.probe
    port = f"port {service.port}" if service.fixed_port else "the port in the variable PORT"
    at_once = _count(service.concurrency, "request")
    yield "serves", f"on {port}, {at_once} at once in each replica"
    yield "models", ", ".join(service.models)
    yield "adapters", "" if service.adapters is None else _adapters(service.adapters)
    yield "replicas", "" if groups else _replicas(service.replicas)
    yield from _list_groups(groups, needs)
    yield (
        "ready",
        f"when {'GET' if probe.body is None else 'POST'} {probe.path} "
        f"{'is answered' if probe.any_status else 'succeeds'}, within "
        f"{format_duration(probe.start)} of the start",
    )
    yield (
        "requests",
        f"wait at most {format_duration(service.timeouts.queue)}; a replica that is stopped "
        f"has {format_duration(service.drain)} to answer its open requests",
    )
    yield "callers", "need a key of the service" if service.keys else ""
    yield "rate", "; ".join(_rate(each) for each in service.rates)
    yield "largest body", _body(service.limits)
    yield "batches", "" if service.batch is None else _batch(service.batch)
    routed = any(each.role is ReplicaRole.ROUTER for each in groups)
    yield "routing", "" if service.routing is None or routed else _routing(service.routing)
    wait = format_duration(service.timeouts.fallback)
    others = [_fallback(each) for each in service.fallbacks]
    yield "fallbacks", f"after {wait}: {listed(others, 'or')}" if others else ""
    yield "devices", "; ".join(_edge(each) for each in service.edge)
    promises = []
    if service.slo.p95 is not None:
        promises.append(f"95% answered within {format_duration(service.slo.p95)}")
    if service.slo.availability is not None:
        promises.append(f"{100 * service.slo.availability:g}% answered")
    goals = ((service.slo.ttft, "first tokens"), (service.slo.token_gap, "gaps between tokens"))
    for goal, name in goals:
        if goal is not None:
            promises.append(f"{100 * goal.share:g}% of {name} within {1000 * goal.limit_s:g} ms")
    yield "promises", listed(promises, "and") if promises else ""
    yield "responses", "have a header with the cost of the request" if service.price_header else ""
    yield "paths", "" if service.strip_prefix else "contain the path of the service"
    yield "updates", _update(service.update)
    yield "queued calls", _queue(service.queue)
    events = [_event(each) for each in service.events]
    events += [_tick(each) for each in service.crons]
    events += [f"each request to the webhook {each.name}" for each in service.webhooks]
    yield "events", "; ".join(events)
    yield "in regions", ", ".join(service.regions)
    yield "stays in", service.residency or ""
    yield "costs at most", format_rate(service.budget) if service.budget is not None else ""


def _adapters(rule: AdapterRule) -> str:
    sources = ", ".join(f"{name} from {source}" for name, source in rule.sources.items())
    return f"{sources}; a replica holds {rule.slots} at a time"


def _fallback(rule: FallbackRule) -> str:
    if rule.api is None:
        return f"the service {rule.service}"
    if rule.api.prices is None:
        return f"{rule.api.model} at {rule.api.host} (its cost is not counted without `price`)"
    prompt, completion = (format_usd(Money(each)) for each in rule.api.prices)
    cost = f"{prompt} and {completion} for a million tokens of prompts and completions"
    return f"{rule.api.model} at {rule.api.host} ({cost})"


def _edge(rule: EdgeRule) -> str:
    where = f"of site {rule.site}" if rule.site else "of all sites"
    return f"those {where} answer requests for {rule.model}, and send what they cannot answer"


def _list_groups(groups: Sequence[ReplicaGroup], needs: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the description of each group of replicas."""
    for each, nodes in zip(groups, needs, strict=True):
        role = "" if each.name == each.role else f", as {each.role}"
        run = "" if each.run is None else f"; runs {shorten(each.run, 1000, placeholder=' …')}"
        yield f"group {each.name}", f"{_replicas(each.replicas)}{role}; on {nodes}{run}"


def _queue(queue: QueueTerms) -> str:
    if queue == QueueTerms():
        return ""
    sent = f"{queue.at_once} at once, " if queue.at_once else ""
    return (
        f"are sent {sent}at most {queue.attempts} times, the second time "
        f"{format_duration(queue.backoff)} after the first failure; results are kept for "
        f"{format_duration(queue.keep)}; at most {queue.waiting} calls wait"
    )


def _event(event: EventTrigger) -> str:
    return f"each object below {event.bucket}, listed every {format_duration(event.every)}"


def _tick(trigger: CronTrigger) -> str:
    return f"calls of {trigger.path} at the times {trigger.cron} ({trigger.time_zone})"


def _update(update: ServiceUpdate) -> str:
    match update.strategy:
        case UpdateStrategy.ROLLING:
            return ""
        case UpdateStrategy.BLUE_GREEN:
            return "all replicas at once, when they are ready"
        case UpdateStrategy.CANARY:
            return (
                f"{update.weight}% of the requests are sent to a new revision, until the "
                f"revision has received {format_count(update.requests, 'request')} or "
                f"{format_duration(update.within)} have passed"
            )


def _replicas(replicas: ReplicaCount) -> str:
    if replicas.least == replicas.most:
        return str(replicas.least)
    text = f"{replicas.least} to {replicas.most}, {_target(replicas)}"
    return (
        f"{text}; scaled down to {replicas.least} after {format_duration(replicas.idle)} without a "
        "request"
    )


def _target(replicas: ReplicaCount) -> str:
    target = replicas.target
    match target.kind:
        case TargetKind.QUEUE_WAIT:
            return f"so that requests wait at most {target.value:g}s"
        case TargetKind.CONCURRENCY:
            return f"for {format_count(target.value, 'request')} at once in each"
        case TargetKind.RATE:
            return f"for {format_count(target.value, 'request')} per second in each"
        case TargetKind.GPU_UTILISATION:
            return f"so that GPUs are busy {100 * target.value:g}% of the time"
        case TargetKind.METRIC:
            return f"so that {target.metric} is {target.value:g} on average"


def _rate(rate: RequestRate) -> str:
    whose = {
        RateScope.CLIENT: "for each client",
        RateScope.ADDRESS: "for each address",
        RateScope.HEADER: f"for each {rate.header}",
        RateScope.SERVICE: "for all clients together",
    }[rate.each]
    below = f" below {rate.prefix}" if rate.prefix else ""
    return (
        f"{_count(rate.requests, 'request')}{below} in {format_duration(rate.per)} {whose}, "
        f"{rate.burst} at once"
    )


def _body(limits: RequestLimits) -> str:
    if limits == RequestLimits():
        return ""
    return f"{format_memory(limits.body_mib)}; at most {limits.waiting} requests wait"


def _batch(batch: BatchRule) -> str:
    return (
        f"requests with the array {batch.input} are joined to batches of at most {batch.most} "
        f"instances, and wait up to {batch.wait.total_seconds() * 1000:g}ms for each other"
    )


def _routing(rule: RoutingRule) -> str:
    match rule.by:
        case RoutingKind.CACHE:
            told = ", which replicas publish" if rule.events else ""
            return f"by what the caches of replicas hold of a prompt{told}, and by their load"
        case RoutingKind.SESSION:
            return "requests of a session go to the same replica while it has room"
        case RoutingKind.HEADER:
            return f"requests with the same {rule.header} go to the same replica while it has room"
        case RoutingKind.LOAD:
            return ""
    assert_never(rule.by)


def _count(number: float, noun: str) -> str:
    return f"{number:g} {noun}" if number == 1 else f"{number:g} {noun}s"

"""The section `service`: how a task answers requests, and on how many replicas."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from cavvy.catalog.regions import AREAS
from cavvy.domain.services import (
    AdapterRule,
    BatchRule,
    CronTrigger,
    EdgeRule,
    EventTrigger,
    FallbackApi,
    FallbackRule,
    LatencyGoal,
    QueueTerms,
    RateScope,
    ReadinessProbe,
    ReplicaCount,
    ReplicaRole,
    ReplicaTarget,
    RequestLimits,
    RequestRate,
    RouterApi,
    RoutingKind,
    RoutingRule,
    ServiceLevel,
    ServiceSpec,
    ServiceTimeouts,
    ServiceUpdate,
    TargetKind,
    UpdateStrategy,
    WebhookSignature,
    WebhookTrigger,
)
from cavvy.domain.targets import is_web_address
from cavvy.domain.tasks import ReplicaGroup, count_all
from cavvy.domain.units import parse_rate, read_number
from cavvy.domain.values import replace
from cavvy.spec.adapters import LORA_OPTIONS, count_slots, is_adapter_name, read_adapter
from cavvy.spec.engines import ENGINES
from cavvy.spec.fields.amounts import size_kind
from cavvy.spec.fields.image import COMMANDS, IMAGE_NAME
from cavvy.spec.fields.kinds import (
    FLAG,
    FieldSpec,
    ListKind,
    MapKind,
    ScalarKind,
    SectionReader,
    SectionSpec,
    WrongValue,
    advise_point,
    check_slug,
    choice,
    either,
    filled,
    matching,
    named_texts,
    number,
    read_text,
    section,
    text_kind,
    whole,
)
from cavvy.spec.fields.places import (
    check_header_name,
    check_header_value,
    read_body,
    read_called_path,
    read_path,
    read_source,
)
from cavvy.spec.fields.resources import RESOURCES, check_count
from cavvy.spec.fields.times import CRON, ZONE, length_kind
from cavvy.spec.problems import listed, shown
from cavvy.spec.tree import MapNode, ScalarNode

_LENGTH = length_kind(timedelta(milliseconds=1), timedelta(hours=24))
_METRIC = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")


def _read_metric(text: str) -> str:
    if not _METRIC.fullmatch(text):
        raise WrongValue(f"{shown(text)} cannot be the name of a Prometheus metric")
    return text


def _read_share(node: ScalarNode) -> float:
    """Return a share between 0 and 1, which the file can also state as a percentage."""
    text = read_text(node).strip()
    try:
        value = read_number(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        hint = advise_point(text)
        raise WrongValue(f"{shown(text)} is not a share", suggestion=hint) from None
    if not 0 < value < 1:
        likely = f"{text}%" if 1 < value < 100 and not text.endswith("%") else "99.9% or 0.999"
        raise WrongValue(f"{shown(text)} is not between 0 and 1", suggestion=f"write {likely}")
    return value


_SHARE = ScalarKind("a share such as 0.999 or 99.9%", _read_share, {"type": ["number", "string"]})
_AMOUNT = number("a number above 0", 0, 1e9, above=True)
# the key of each target, and the kind of target
_TARGETS = {
    "queue_wait": TargetKind.QUEUE_WAIT,
    "concurrency": TargetKind.CONCURRENCY,
    "rate": TargetKind.RATE,
    "gpu_utilisation": TargetKind.GPU_UTILISATION,
    "metric": TargetKind.METRIC,
}


def _build_target(table: SectionReader) -> ReplicaTarget | None:
    given = [name for name in _TARGETS if table.has(name)]
    if len(given) != 1:
        message = "the target is empty" if not given else f"{' and '.join(given)} are both targets"
        table.notes.add(
            table.node.mark, message, expected="one target", suggestion=f"keep one of {_names()}"
        )
        return None
    (name,) = given
    value: Any = table.get(name)
    if name == "queue_wait":
        value = value.total_seconds() if value is not None else None
    if name == "metric":
        metric, value = value, table.get("value")
        if value is None:
            table.wrong("metric", "a metric needs `value`", suggestion="add `value: 10`")
            return None
        return ReplicaTarget(kind=TargetKind.METRIC, value=value, metric=metric)
    if table.has("value"):
        table.wrong("value", "`value` is for `metric` only", suggestion="delete it")
    return None if value is None else ReplicaTarget(kind=_TARGETS[name], value=value)


def _names() -> str:
    return ", ".join(_TARGETS)


_TARGET = section(
    "service.replicas.target",
    _build_target,
    queue_wait=_LENGTH,
    concurrency=_AMOUNT,
    rate=_AMOUNT,
    gpu_utilisation=_SHARE,
    metric=text_kind("the name of a Prometheus metric", _read_metric),
    value=_AMOUNT,
)


def _build_replicas(table: SectionReader) -> ReplicaCount:
    count = ReplicaCount(**table.values())
    if not table.has("max") and count.least > count.most:
        count = replace(count, most=count.least)
    if count.least > count.most:
        table.wrong(
            "min",
            f"the minimum ({count.least}) exceeds the maximum ({count.most})",
            suggestion="lower `min` or raise `max`",
        )
    return count


def _build_probe(table: SectionReader) -> ReadinessProbe:
    values = table.values()
    headers = tuple(values.pop("headers", {}).items())
    if len({name.lower() for name, _ in headers}) < len(headers):
        table.wrong("headers", "two headers have the same name", suggestion="delete one of them")
    return ReadinessProbe(**values, headers=headers)


_COUNT = whole(0, 1000)
_REPLICAS = either(
    _COUNT,
    lambda count: ReplicaCount(least=count, most=max(1, count)),
    section(
        "service.replicas",
        _build_replicas,
        min=FieldSpec(_COUNT, to=("least",)),
        max=FieldSpec(whole(1, 1000), to=("most",)),
        target=_TARGET,
        idle=length_kind(timedelta(seconds=10)),
    ),
)
_BODY = text_kind("a text of at most 64 KiB", read_body)
_PROBE_PATH = text_kind("a path such as /health", read_path)
_PROBE = either(
    _PROBE_PATH,
    lambda path: ReadinessProbe(path=path),
    section(
        "service.probe",
        _build_probe,
        path=_PROBE_PATH,
        headers=MapKind(
            "names of headers, each with a string value",
            check_header_name,
            text_kind("a string", check_header_value, numbers=True),
        ),
        body=_BODY,
        every=_LENGTH,
        timeout=_LENGTH,
        start=_LENGTH,
        failures=whole(1, 100),
        any_status=FLAG,
    ),
)


def _build_group(table: SectionReader) -> dict[str, Any] | None:
    """Return the values of a group; its name may be its role."""
    values = table.values()
    count = values.get("replicas")
    if count is not None and not count.least and isinstance(table.node.get("replicas"), ScalarNode):
        table.wrong(
            "replicas",
            "a group without replicas does nothing",
            suggestion="write `{min: 0, max: 2}` for a group that ends when there are no requests",
        )
    if table.has("role") and "role" not in values:
        return None
    return {**values, "at": table.node.mark}


_GROUPS = MapKind(
    "names of groups, such as router, prefill and decode, each with a table",
    matching(r"[a-z][a-z0-9-]{0,39}", "is not a name of a-z, 0-9 and -"),
    section(
        "service.groups",
        _build_group,
        role=choice(ReplicaRole),
        replicas=_REPLICAS,
        router=choice(RouterApi),
        resources=RESOURCES,
        nodes=whole(1, 10_000),
        run=COMMANDS,
        setup=COMMANDS,
        image=IMAGE_NAME,
        concurrency=whole(1, 100_000),
        probe=_PROBE,
    ),
)
_PARTS = (ReplicaRole.PREFILL, ReplicaRole.DECODE)


def _read_groups(table: SectionReader) -> tuple[ReplicaGroup, ...]:
    node, found = table.node.get("groups"), list[ReplicaGroup]()
    for name, values in (table.get("groups") or {}).items():
        mark = values.pop("at")
        if "role" not in values and name in tuple(ReplicaRole):
            values["role"] = ReplicaRole(name)
        elif "router" in values:
            values.setdefault("role", ReplicaRole.ROUTER)
        if "router" in values and values["role"] is not ReplicaRole.ROUTER:
            hint = "delete `router`, or write `role: router`"
            table.notes.add(
                mark, f"the group {name} has the key `router`, but is no router", suggestion=hint
            )
        if "role" not in values:
            table.notes.add(
                mark,
                f"the role of the group {name} is unknown",
                expected=f"a group called {listed(ReplicaRole, 'or')}, or one with `role`",
                suggestion="add, for example, `role: decode`",
            )
            continue
        found.append(ReplicaGroup(name=name, **values))
    if table.has("groups") and table.has("replicas"):
        table.wrong(
            "replicas",
            "each group has its own number of replicas",
            suggestion="write `replicas` into the groups, and delete it here",
        )
    if isinstance(node, MapNode) and len(found) == len(node.entries):
        for problem, hint in object_to_groups(found):
            table.wrong("groups", problem, suggestion=hint)
    for each in ("adapters", "batch"):
        if table.has(each) and any(group.role is ReplicaRole.ROUTER for group in found):
            table.wrong(
                each,
                f"`{each}` has no effect behind a router, which chooses the workers itself",
                suggestion=f"delete `{each}`, or the group with the role router",
            )
    return tuple(found)


def object_to_groups(groups: Sequence[ReplicaGroup]) -> Iterator[tuple[str, str]]:
    """Yield why these groups cannot form a service, each reason with a hint."""
    roles = [each.role for each in groups]
    if not roles:
        yield "no group is named", "add groups, or delete `groups`"
    parts = [each for each in _PARTS if each in roles]
    if len(parts) == 1:
        missing = next(each for each in _PARTS if each not in roles)
        yield (
            f"a group with the role {parts[0]} needs one with the role {missing}",
            f"add the group {missing}",
        )
    if parts and ReplicaRole.ROUTER not in roles:
        yield (
            "prefill and decode need a router, which sends each request to one of each",
            "add the group router, such as "
            "`router: {run: exec smg launch --port $PORT --pd-disaggregation}`",
        )
    if parts and ReplicaRole.WORKER in roles:
        yield "workers cannot be combined with prefill and decode", "change the role of a group"
    if roles.count(ReplicaRole.ROUTER) > 1:
        yield "two groups have the role router", "keep one of them"
    if roles == [ReplicaRole.ROUTER]:
        yield "the router has no workers", "add the groups prefill and decode, or worker"
    for each in groups:
        if each.role is ReplicaRole.ROUTER and each.replicas.least != each.replicas.most:
            yield (
                "the number of routers is not scaled",
                f"write a number into the group {each.name}",
            )


_CALLED_PATH = text_kind("a path such as /v1/files", read_called_path)
_TIMEOUTS = section(
    "service.timeouts",
    lambda table: table.make(ServiceTimeouts),
    queue=_LENGTH,
    fallback=_LENGTH,
    response=_LENGTH,
    silence=_LENGTH,
)
_SURELY_MS = timedelta(seconds=10)  # a longer time without a unit was meant in milliseconds
_SHARES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}


def _build_goal(table: SectionReader) -> LatencyGoal | None:
    given = [name for name in _SHARES if table.has(name)]
    if len(given) != 1:
        if not given and table.node.entries:
            return None  # an unknown percentile is a problem of its own
        message = "no percentile is given" if not given else f"{' and '.join(given)} are given"
        expected, hint = "one percentile", "write p95, such as `{p95: 800ms}`"
        table.notes.add(table.node.mark, message, expected=expected, suggestion=hint)
        return None
    limit: Any = table.get(given[0])
    written = table.node.get(given[0])
    if limit is None:
        return None
    if isinstance(written, ScalarNode) and written.text.isdecimal() and limit >= _SURELY_MS:
        table.notes.add(
            written.mark,
            f"a number without a unit is seconds, and {written.text} seconds is no objective",
            suggestion=f"write {written.text}ms, or {written.text}s if you mean seconds",
        )
        return None
    return LatencyGoal(share=_SHARES[given[0]], limit=limit)


def _goal(path: str) -> SectionSpec:
    return section(path, _build_goal, p50=_LENGTH, p90=_LENGTH, p95=_LENGTH, p99=_LENGTH)


_SLO = section(
    "service.slo",
    lambda table: table.make(ServiceLevel),
    p95=_LENGTH,
    availability=_SHARE,
    ttft=_goal("service.slo.ttft"),
    token_gap=_goal("service.slo.token_gap"),
)


def _build_rate(table: SectionReader) -> RequestRate | None:
    rate = table.make(RequestRate)
    if rate is None:
        return None
    by_header = rate.each is RateScope.HEADER
    if by_header and rate.header is None:
        table.wrong("each", "no header is named", suggestion="add `header: X-User`")
    elif rate.header is not None and not by_header:
        table.wrong(
            "header",
            "`header` has no effect here",
            suggestion="add `each: header`, or delete `header`",
        )
    if not 1e-5 <= rate.per_s <= 1e6:
        table.wrong("requests", f"{rate.per_s:g} requests a second are out of bounds")
    return rate


def _read_header(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9-]{1,100}", text):
        raise WrongValue(f"{shown(text)} cannot be the name of a header")
    return text


def _read_prefix(text: str) -> str:
    if not re.fullmatch(r"(/[A-Za-z0-9._~-]+)+/?|/", text):
        raise WrongValue(f"{shown(text)} is not a path", suggestion="write a path such as /v1")
    return text.rstrip("/")


_REQUESTS = number("a number above 0", 0, 1e9, above=True)
_RATE = either(
    _REQUESTS,
    lambda requests: RequestRate(requests=requests, burst=max(1, math.ceil(requests))),
    section(
        "service.rate",
        _build_rate,
        requests=FieldSpec(_REQUESTS, required=True),
        per=length_kind(timedelta(seconds=1), timedelta(hours=24)),
        burst=whole(1, 1_000_000),
        each=choice(RateScope, {"key": RateScope.CLIENT, "ip": RateScope.ADDRESS}),
        header=text_kind("the name of a header", _read_header),
        prefix=text_kind("a path such as /v1", _read_prefix),
    ),
)


def _read_weight(node: ScalarNode) -> int:
    text, likely = read_text(node).strip(), "10%"
    with suppress(WrongValue):
        percent = round(100 * _read_share(node), 6)
        if percent == int(percent):
            return int(percent)
    if re.fullmatch(r"[0-9]{1,2}", text) and int(text):
        likely = f"{int(text)}%"
    raise WrongValue(f"{shown(text)} is not a whole percentage", suggestion=f"write {likely}")


def _build_update(table: SectionReader) -> ServiceUpdate | None:
    update = table.make(ServiceUpdate)
    if update is not None and update.strategy is not UpdateStrategy.CANARY:
        for name in ("weight", "requests", "within"):
            if table.has(name):
                table.wrong(
                    name,
                    f"`{name}` is for canaries only",
                    suggestion="add `strategy: canary`, or delete this key",
                )
    return update


_STRATEGY = choice(UpdateStrategy, {"blue_green": UpdateStrategy.BLUE_GREEN})
_UPDATE = either(
    _STRATEGY,
    lambda strategy: ServiceUpdate(strategy=strategy),
    section(
        "service.update",
        _build_update,
        strategy=_STRATEGY,
        weight=ScalarKind(
            "a whole percentage such as 10%", _read_weight, {"type": ["number", "string"]}
        ),
        requests=whole(10, 1_000_000),
        within=length_kind(timedelta(seconds=1), timedelta(days=30)),
    ),
)
_LIMITS = section(
    "service.limits",
    lambda table: table.make(RequestLimits),
    body=FieldSpec(size_kind("a size such as 100MiB"), to=("body_mib",)),
    waiting=whole(1, 1_000_000),
)


def _read_key(text: str) -> str:
    if not 0 < len(text) <= 100:
        raise WrongValue(f"{shown(text)} cannot be the key of an array")
    return text


_INSTANCES = whole(2, 256)
_ARRAY = text_kind("the key of an array", _read_key)
_BATCH = either(
    _INSTANCES,
    lambda most: BatchRule(most=most),
    section(
        "service.batch",
        lambda table: table.make(BatchRule),
        max=FieldSpec(_INSTANCES, to=("most",)),
        wait=length_kind(timedelta(0), timedelta(seconds=10)),
        input=_ARRAY,
        output=_ARRAY,
    ),
)
_BY = choice(RoutingKind)
_ROUTING = either(
    _BY,
    lambda kind: RoutingRule(by=kind),
    section(
        "service.routing",
        lambda table: _build_routing(table),
        by=_BY,
        header=text_kind("the name of a header", _read_header),
        cache_tokens=whole(1, 1_000_000_000),
        events=FLAG,
    ),
)
_QUEUE = section(
    "service.queue",
    lambda table: table.make(QueueTerms),
    attempts=whole(1, 100),
    backoff=length_kind(timedelta(seconds=1), timedelta(hours=1)),
    keep=length_kind(timedelta(minutes=1), timedelta(days=30)),
    at_once=whole(1, 256),
    waiting=whole(1, 10_000_000),
)


def _read_bucket(text: str) -> str:
    url = read_source(text)
    if not url.startswith(("s3://", "gs://", "az://")):
        raise WrongValue(
            f"{shown(text)} is not the URL of a bucket", suggestion="write s3://bucket/folder/"
        )
    return url


# the kinds of events, by the key that names the kind, with the other keys that belong to each
_EVENT_KINDS: Mapping[
    str, tuple[type[EventTrigger | CronTrigger | WebhookTrigger], frozenset[str]]
] = {
    "bucket": (EventTrigger, frozenset({"every", "path"})),
    "cron": (CronTrigger, frozenset({"time_zone", "body", "path"})),
    "webhook": (WebhookTrigger, frozenset({"secret", "signature", "path"})),
}


def _build_event(table: SectionReader) -> EventTrigger | CronTrigger | WebhookTrigger | None:
    named = table.find_one(tuple(_EVENT_KINDS), "source")
    if not named:
        return None
    kind, others = _EVENT_KINDS[named]
    values = table.values()
    for name in sorted(values.keys() - others - {named}):
        table.wrong(
            name,
            f"`{name}` has no effect in an event with the source `{named}`",
            suggestion="delete it",
        )
        del values[name]
    if named == "webhook":
        if "secret" not in values:
            table.wrong("webhook", "`secret` is missing", suggestion="name a secret of the project")
            return None
        values["name"] = values.pop("webhook", None)
        return WebhookTrigger(**values) if values["name"] else None
    return kind(**values) if named in values else None


_SECRET = text_kind(
    "the name of a secret",
    matching(
        r"[A-Za-z_][A-Za-z0-9_]{0,127}",
        "is not a secret name",
        expected="the name of a secret, whose value `cavvy secret set NAME` stores",
    ),
)
_EVENT = section(
    "service.events",
    _build_event,
    bucket=text_kind("the URL of a bucket's folder such as s3://bucket/in/", _read_bucket),
    every=length_kind(timedelta(seconds=1), timedelta(hours=24)),
    cron=CRON,
    time_zone=ZONE,
    body=_BODY,
    webhook=text_kind(
        "a name of small letters, digits and -",
        matching(r"[a-z0-9][a-z0-9-]{0,62}", "is not a name"),
    ),
    secret=_SECRET,
    signature=choice(WebhookSignature),
    path=_CALLED_PATH,
)


def _read_model(text: str) -> str:
    if not re.fullmatch(r"[!-~]{1,200}", text):
        raise WrongValue(f"{shown(text)} cannot be the name of a model")
    return text


_URL_MAX = 500  # bytes; the gateway refuses longer ones
_API_URL = re.compile(
    r"https?://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]{1,247})(:[0-9]{1,5})?"
    r"(/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)*/?"
)


def _read_api_url(text: str) -> str:
    if not (len(text) <= _URL_MAX and _API_URL.fullmatch(text) and is_web_address(text)):
        suggestion = "write https://api.example.com/v1, without a query"
        raise WrongValue(f"{shown(text)} is not the URL of an API", suggestion=suggestion)
    return text.rstrip("/")


_PRICE = number("dollars for a million tokens, such as 0.15", 0, 1e6)


def _build_prices(table: SectionReader) -> tuple[int, int] | None:
    found = table.get("input"), table.get("output")
    if None in found:
        return None
    return round(found[0] * 1e6), round(found[1] * 1e6)


def _build_api(table: SectionReader) -> FallbackApi | None:
    api = table.make(FallbackApi)
    if api is not None and api.secret and api.url.startswith("http://"):
        table.wrong(
            "base_url",
            "the key would be sent without TLS",
            suggestion="write https://, or delete `key`",
        )
    return api


_API = section(
    "service.fallback.openai",
    _build_api,
    base_url=FieldSpec(text_kind("the URL of an API", _read_api_url), to=("url",)),
    model=FieldSpec(text_kind("the name of a model", _read_model), required=True),
    key=FieldSpec(_SECRET, to=("secret",)),
    price=FieldSpec(
        section(
            "service.fallback.openai.price",
            _build_prices,
            input=FieldSpec(_PRICE, required=True),
            output=FieldSpec(_PRICE, required=True),
        ),
        to=("prices",),
    ),
)


def _build_fallback(table: SectionReader) -> FallbackRule | None:
    named = table.find_one(("service", "openai"), "a fallback")
    if named == "openai":
        table.reject_beside("openai", ("model",))
        api = table.get("openai")
        return None if api is None else FallbackRule(api=api)
    name = table.get("service")
    return FallbackRule(service=name, model=table.get("model") or "") if name else None


_OTHER = text_kind("the name of another service", check_slug)
_FALLBACK = either(
    _OTHER,
    lambda name: FallbackRule(service=name),
    section(
        "service.fallback",
        _build_fallback,
        service=_OTHER,
        model=text_kind("the name of a model", _read_model),
        openai=_API,
    ),
)


def _check_fallbacks(table: SectionReader, spec: ServiceSpec) -> None:
    check_count(table, "fallback", _MOST_FALLBACKS)
    if spec.batch is not None:
        table.wrong(
            "batch",
            "joined requests cannot be sent to fallbacks",
            suggestion="delete `batch` or `fallback`",
        )
    apis = [each.api for each in spec.fallbacks if each.api is not None]
    bound = next((each for each in ("residency", "regions") if table.has(each)), None)
    if apis and bound:
        table.wrong(
            "fallback",
            f"the API at {apis[0].host} may answer in any place, and `{bound}` names places",
            expected="other services with the same places",
            suggestion=f"delete `openai`, or `{bound}`",
        )
    names = [(each.service, "") for each in spec.fallbacks if each.service]
    names += [(each.url, each.model) for each in apis]
    if len(set(names)) < len(names):
        table.wrong("fallback", "a fallback is named twice", suggestion="delete one of the two")


_EDGE = section(
    "service.edge",
    lambda table: table.make(EdgeRule),
    site=text_kind("the name of a site", check_slug),
    model=FieldSpec(text_kind("the name of a published model", check_slug), required=True),
    key=FieldSpec(_SECRET, to=("secret",)),
    below=_SHARE,
)


def _check_edge(table: SectionReader, spec: ServiceSpec) -> None:
    check_count(table, "edge", _MOST_EDGE)
    if spec.keys and not all(each.secret for each in spec.edge):
        table.wrong(
            "edge",
            "requests to the service need a key, and the devices have none",
            suggestion="store a key with `cavvy secret set`, and add `key: NAME`",
        )
    if len({(each.site, each.model) for each in spec.edge}) < len(spec.edge):
        table.wrong("edge", "a site is named twice", suggestion="delete one of the two")


def _check_adapter(text: str) -> None:
    if not is_adapter_name(text):
        hint = "use letters, digits and . _ / -"
        raise WrongValue(f"{shown(text)} cannot be the name of an adapter", suggestion=hint)


def _read_name(text: str) -> str:
    label = "[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
    if len(text) > 253 or not re.fullmatch(rf"{label}(\.{label})+", text):
        raise WrongValue(f"{shown(text)} is not a host name", suggestion="write chat.example.com")
    return text


def _read_origin(text: str) -> str:
    port = ":([1-9][0-9]{0,4})"
    host = r"(\[[0-9a-f:.]+\]|[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?)"
    plain = text.lower()
    # applications have other schemes, such as tauri://localhost
    found = re.fullmatch(rf"[a-z][a-z0-9+.-]{{0,30}}://{host}({port})?", plain)
    if plain == "*" or (found and int(found[4] or 0) <= 65535):
        for scheme, usual in (("http://", ":80"), ("https://", ":443")):
            if plain.startswith(scheme):
                plain = plain.removesuffix(usual)  # as browsers write it
        return plain
    suggestion = "write https://app.example.com, without a path, or '*' for every origin"
    raise WrongValue(f"{shown(text)} is not the origin of a page", suggestion=suggestion)


def _read_area(text: str) -> str:
    if text not in AREAS:
        raise WrongValue(f"{shown(text)} is not an area", expected=", ".join(sorted(AREAS)))
    return text


_MOST_ADAPTERS = 1000
_MOST_EVENTS = 100  # sources of calls that the server checks again and again
_MOST_FALLBACKS = 5
_MOST_EDGE = 100


def _build(table: SectionReader) -> tuple[ServiceSpec, tuple[ReplicaGroup, ...]] | None:
    spec, groups = table.make(ServiceSpec), _read_groups(table)
    if spec is None:
        return None
    if groups:
        spec = replace(spec, replicas=count_all(groups))
    events = table.get("events") or ()
    check_count(table, "events", _MOST_EVENTS)
    spec = replace(
        spec,
        events=tuple(each for each in events if isinstance(each, EventTrigger)),
        crons=tuple(each for each in events if isinstance(each, CronTrigger)),
        webhooks=tuple(each for each in events if isinstance(each, WebhookTrigger)),
    )
    if len({each.name for each in spec.webhooks}) < len(spec.webhooks):
        table.wrong("events", "two webhooks have the same name", suggestion="rename one of them")
    if spec.probe.timeout > spec.probe.every:
        table.wrong(
            "probe",
            "the probe's timeout exceeds the time between probes",
            suggestion="lower `timeout` or raise `every`",
        )
    if spec.batch is not None:
        _check_batch(table)
    if spec.fallbacks:
        _check_fallbacks(table, spec)
    if spec.edge:
        _check_edge(table, spec)
    _check_goals(table, spec)
    if table.has("adapters"):
        spec = replace(spec, adapters=_build_adapters(table, spec))
    if spec.routing is not None and spec.routing.events:
        _check_events(table)
    engine = ENGINES.get(str(table.get("engine")))
    if spec.routing is None and engine is not None and engine.chats:
        spec = replace(spec, routing=RoutingRule())
    elif spec.routing is not None and spec.routing.by is RoutingKind.LOAD:
        spec = replace(spec, routing=None)
    return spec, groups


def _build_adapters(table: SectionReader, spec: ServiceSpec) -> AdapterRule | None:
    """Return the adapters, which the engine named in `engine` serves."""
    engine, given = str(table.get("engine", "")), table.get("adapters", {})
    if engine not in LORA_OPTIONS:
        what = f"the engine {engine} cannot serve them" if engine else "no engine is named"
        table.wrong(
            "adapters",
            f"`adapters` has no effect: {what}",
            expected=listed(LORA_OPTIONS),
            suggestion="add `engine: vllm`" if not engine else "delete `adapters`",
        )
        return None
    check_count(table, "adapters", _MOST_ADAPTERS)
    model = table.get("model")
    for name in sorted(given.keys() & {*spec.models, model}):
        message = f"the adapter {shown(name)} has the name of the base model"
        table.wrong("adapters", message, suggestion="rename the adapter")
    sources = {}
    for name, source in given.items():
        try:
            sources[name] = read_adapter(name, source, engine).path
        except ValueError as error:
            message = f"{shown(source)} is not the source of an adapter"
            table.wrong("adapters", message, suggestion=f"adapter {name}: {error}")
    with suppress(ValueError):  # engine_section.py has reported the options
        slots = count_slots(engine, table.get("options", {}), len(sources))
        return AdapterRule(engine=engine, sources=sources, slots=slots) if sources else None
    return None


def _build_routing(table: SectionReader) -> RoutingRule | None:
    rule = table.make(RoutingRule)
    if rule is None:
        return None
    if rule.header is not None and rule.by is not RoutingKind.HEADER:
        table.wrong(
            "header",
            f"with `by: {rule.by}`, no header is read",
            suggestion="write `by: header` or delete `header`",
        )
    if rule.header is None and rule.by is RoutingKind.HEADER:
        table.wrong(
            "by",
            "the header is not named",
            suggestion="add its name, such as `header: X-Tenant`",
        )
    if rule.cache_tokens is not None and rule.by is not RoutingKind.CACHE:
        table.wrong(
            "cache_tokens",
            f"with `by: {rule.by}`, the cache does not matter",
            suggestion="write `by: cache` or delete `cache_tokens`",
        )
    if rule.events and rule.by is not RoutingKind.CACHE:
        table.wrong(
            "events",
            f"with `by: {rule.by}`, the cache does not matter",
            suggestion="write `by: cache` or delete `events`",
        )
    return rule


def _check_events(table: SectionReader) -> None:
    """Refuse events of engines that publish none, and of groups, which their router knows."""
    engine = str(table.get("engine", ""))
    if engine and not (engine in ENGINES and ENGINES[engine].events):
        able = " and ".join(name for name, each in ENGINES.items() if each.events)
        table.wrong(
            "routing",
            f"the engine {engine} publishes no events",
            suggestion=f"delete `events`; {able} publish them",
        )
    elif table.has("groups"):
        table.wrong(
            "routing",
            "the events of groups go to their own router",
            suggestion="delete `events`, or the groups",
        )


def _check_goals(table: SectionReader, spec: ServiceSpec) -> None:
    """Refuse objectives for tokens of services whose answers are not measured."""
    for name, goal in (("ttft", spec.slo.ttft), ("token_gap", spec.slo.token_gap)):
        if goal is not None and not spec.models:
            table.wrong(
                "slo",
                f"`{name}` is for language models, and the service has no `models`",
                suggestion="add `models: [NAME]`, or use `p95`",
            )
        elif goal is not None and spec.batch is not None:
            table.wrong(
                "slo",
                f"`{name}` is measured in streams, and joined requests are not streamed",
                suggestion="delete `batch`, or use `p95`",
            )


def _check_batch(table: SectionReader) -> None:
    """Refuse batches for programs whose responses the gateway cannot divide."""
    engine = table.get("engine")
    batch = table.get("batch")
    routing = table.get("routing")
    if isinstance(routing, RoutingRule) and routing.by is not RoutingKind.LOAD:
        table.wrong(
            "routing",
            "joined requests cannot be sent to different replicas",
            suggestion="delete `batch` or `routing`",
        )
    if engine == "onnxruntime" and isinstance(batch, BatchRule):
        if (batch.input, batch.output) != (BatchRule().input, BatchRule().output):
            table.wrong(
                "batch",
                "the engine onnxruntime accepts `instances` and returns `predictions`",
                suggestion="delete `input` and `output`",
            )
    elif engine is not None:
        table.wrong(
            "batch",
            f"the engine {engine} forms batches itself",
            expected="the engine onnxruntime, or a program without batches of its own",
            suggestion="delete `batch`",
        )
    if engine in (None, "onnxruntime") and table.get("models"):
        table.wrong(
            "batch",
            "responses of language models can be streams, which cannot be divided",
            suggestion="delete `batch` or `models`",
        )


_SOURCE = text_kind("a model's name or path", filled)
_MODEL = either(
    _SOURCE,
    lambda source: source,
    section(
        "service.model",
        lambda table: table.get("source"),
        source=FieldSpec(_SOURCE, required=True),
        optimise=text_kind("onnx-int8", filled),
        samples=text_kind("a file with samples", filled),
        agree=_SHARE,
        compare=text_kind("top or cosine", filled),
    ),
)


def names_port(run: str, env: Mapping[str, str], port: int) -> bool:
    """Return whether the command or a variable of a service says that the program listens on this
    port, as in `--port 8080`, `-p 8080`, `0.0.0.0:8080`, `http.server 8080`, `PORT=8080 serve` or
    STREAMLIT_PORT=8080. The port of another program, as in `http://localhost:8080`, is none. A
    command that reads the variable PORT does not, because PORT is the replica's own port.
    """
    begin = r"(?m)(?:^|[;&|(])[ \t]*(?:(?:export|env)[ \t]+)?(?:\w{1,64}=\S{0,64}[ \t]+){0,8}"
    if re.search(rf"{begin}PORT=[\"']?{port}(?![\w.])", run):
        return True
    if re.search(r"\bPORT\b", run):
        return False
    if any(name.endswith("_PORT") and each == str(port) for name, each in env.items()):
        return True
    hosts = (
        r"(?:0\.0\.0\.0|\[::\]|\*|\+):",
        r"(?<![/@\w.-])(?:127\.0\.0\.1|localhost|\[::1\]):",
        r"(?<![^\s=\"']):",
        r"(?:\s-b|--(?:bind|listen|addr(?:ess)?))[\s=\"']{1,9}\S{0,99}:",
    )
    words = (*hosts, "port", r"\s-[pl]", "--(?:listen|bind)", r"http\.server")
    return re.search(rf"(?i)(?:{'|'.join(words)})[\s=\"']*{port}(?![\w.])", run) is not None


SERVICE = section(
    "service",
    _build,
    # engine_section.py has replaced these keys with `run`, `port`, `probe` and `models`
    engine=FieldSpec(text_kind("the name of an engine", filled), to=()),
    model=FieldSpec(_MODEL, to=()),
    options=FieldSpec(
        named_texts(
            "options of the engine, each with a value",
            matching(r"(--)?[a-z0-9][a-z0-9-]{0,80}", "cannot be an option"),
            missing="the option has no value",
            hint="write true for an option without a value",
        ),
        to=(),
    ),
    port=whole(1, 65535, "a port, from 1 to 65535"),
    replicas=_REPLICAS,
    groups=FieldSpec(_GROUPS, to=()),
    concurrency=whole(1, 100_000),
    probe=_PROBE,
    drain=length_kind(timedelta(0), timedelta(hours=24)),
    timeouts=_TIMEOUTS,
    adapters=FieldSpec(
        named_texts(
            "names of LoRA adapters, each with a source",
            _check_adapter,
            missing="the adapter has no source",
            hint="write a path on the replica, or hf://ORGANIZATION/NAME",
        ),
        to=(),
    ),
    models=ListKind(text_kind("the name of a model", _read_model), single=True),
    hosts=ListKind(text_kind("a host name such as chat.example.com", _read_name), single=True),
    keys=FLAG,
    origins=ListKind(
        text_kind("an origin such as https://app.example.com", _read_origin), single=True
    ),
    rate=FieldSpec(ListKind(_RATE, single=True), to=("rates",)),
    limits=_LIMITS,
    batch=_BATCH,
    routing=_ROUTING,
    fallback=FieldSpec(ListKind(_FALLBACK, single=True), to=("fallbacks",)),
    edge=ListKind(_EDGE, single=True),
    slo=_SLO,
    regions=ListKind(
        text_kind("a region's name, or an area such as eu, us or asia", filled), single=True
    ),
    residency=text_kind("an area such as eu, us or asia", _read_area),
    budget=ScalarKind(
        "dollars per hour such as 15 or $15/h",
        lambda node: parse_rate(read_text(node)),
        {"type": ["number", "string"]},
    ),
    price_header=FLAG,
    strip_prefix=FLAG,
    update=_UPDATE,
    queue=_QUEUE,
    events=FieldSpec(ListKind(_EVENT, single=True), to=()),
)

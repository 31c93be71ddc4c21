"""Translates the keys of dstack's services. The defaults come from dstack's configuration reference
(`.dstack.yml` of type `service`).
"""

import re
from collections.abc import Mapping
from datetime import timedelta

from cavvy.capabilities.importers.common_fields import UNBOUNDED, find_header_problem
from cavvy.capabilities.importers.dstack.scalars import read_duration
from cavvy.capabilities.importers.readers import as_text, child, entries, int_at, items, text_at
from cavvy.domain.services import (
    RateScope,
    ReadinessProbe,
    ReplicaCount,
    ReplicaTarget,
    RequestRate,
    ServiceSpec,
    TargetKind,
)
from cavvy.domain.tasks import ReplicaGroup, count_all
from cavvy.spec.kept_keys import TranslationNotes, mark_of
from cavvy.spec.tree import MapNode, Node, ScalarNode

_LONGEST_HEADER = 100  # of the gateway
_IDLE_S = 600  # dstack's scale_down_delay
_PROBED_EVERY_S, _PROBE_TIMEOUT_S = 15.0, 10.0
_START = timedelta(minutes=20)
_WHEN = (
    "the autoscaler adds replicas as soon as requests would be late, and removes them when "
    "there are no requests"
)
_OWN_PATH = (
    "the service's path is /PROJECT/NAME, such as /default/chat, and not "
    "/proxy/services/PROJECT/NAME; change the path in the program's own settings"
)
_VARIABLE = re.compile(r"\$\{\{\s*env\.(\w+)\s*\}\}")
_NOT_EVALUATED = (
    "expressions in ${{ }} cannot be evaluated, except variables with a value; write the value, or "
    "set the variable with --env NAME=VALUE"
)
_NOTED = {
    "https": "TLS of the gateway is a setting of the server",
    "gateway": "the Cavvy server has one gateway, which all services share",
}


def read_service(
    root: Node, kept_keys: TranslationNotes, groups: tuple[ReplicaGroup, ...]
) -> ServiceSpec:
    for key, reason in _NOTED.items():
        if child(root, key) is not None:
            kept_keys.note_at(root, key, reason)
    keeps_prefix = text_at(root, "strip_prefix") == "False"
    if keeps_prefix:
        kept_keys.note_at(root, "strip_prefix", _OWN_PATH)
    model = _read_model(root, kept_keys)
    return ServiceSpec(
        port=_read_port(root),
        fixed_port=True,
        models=() if model is None else (model,),
        replicas=count_all(groups) if groups else read_replicas(root, kept_keys),
        concurrency=UNBOUNDED,
        probe=_read_probe(root, "/" if model is None else "/v1/models", kept_keys),
        keys=text_at(root, "auth") != "False",
        strip_prefix=not keeps_prefix,
        rates=tuple(_read_rate(each, kept_keys) for each in items(child(root, "rate_limits"))),
    )


def _read_port(root: Node) -> int:
    """Return the port in the container: `8000`, `80:8000`, or a table."""
    node = child(root, "port")
    if isinstance(node, ScalarNode):
        return int(as_text(node).rpartition(":")[2])
    return int_at(node, "container_port") or 80


def _read_model(root: Node, kept_keys: TranslationNotes) -> str | None:
    node = child(root, "model")
    if isinstance(node, ScalarNode):
        return as_text(node)
    if text_at(node, "format") == "tgi":
        kept_keys.note_at(
            root,
            "model",
            "requests are passed on unchanged; TGI 1.4 and newer support OpenAI's format",
        )
    if text_at(node, "prefix") not in (None, "/v1", "/v1/"):
        kept_keys.refuse_at(root, "model", "the model's path must begin with /v1")
    return text_at(node, "name")


def read_replicas(root: Node, kept_keys: TranslationNotes) -> ReplicaCount:
    """Return the number of replicas of a service, or of one of its groups."""
    node, scaling = child(root, "replicas") or child(root, "count"), child(root, "scaling")
    least, most = 1, 1
    if isinstance(node, ScalarNode):
        low, _, high = as_text(node).partition("..")
        least = int(low or 0)
        most = int(high or least) if ".." in as_text(node) else least
    elif isinstance(node, MapNode):
        least = int_at(node, "min") or 0
        most = int_at(node, "max") or least
    if scaling is None:
        return ReplicaCount(least=least, most=max(1, most))
    for key in ("window", "scale_up_delay"):
        if child(scaling, key) is not None:
            kept_keys.note_at(scaling, f"scaling.{key}", _WHEN)
    target = float(text_at(scaling, "target") or 1)
    idle_s = _seconds(scaling, "scale_down_delay", _IDLE_S)
    return ReplicaCount(
        least=least,
        most=max(1, most),
        target=ReplicaTarget(kind=TargetKind.RATE, value=target),
        idle=timedelta(seconds=max(10.0, idle_s)),
    )


def _read_probe(root: Node, usual: str, kept_keys: TranslationNotes) -> ReadinessProbe:
    """Return the first probe. Without a probe, dstack treats a replica as ready when its program
    runs or its model answers. In Cavvy, the replica must answer an HTTP request or list its models.
    """
    probes = items(child(root, "probes"))
    if not probes:
        return ReadinessProbe(path=usual, start=_START, any_status=usual == "/")
    if len(probes) > 1:
        kept_keys.refuse_at(root, "probes", "a service can have only one probe")
    probe = probes[0]
    values = _list_values(root)
    method = (text_at(probe, "method") or "get").lower()
    body = _fill_in(text_at(probe, "body"), values)
    if method not in ("get", "post"):
        kept_keys.refuse_at(probe, "probes.method", "probes are GET or POST requests")
    elif method == "get" and body is not None:
        kept_keys.refuse_at(
            probe,
            "probes.body",
            "a GET request of a probe cannot have a body; write `method: post` or delete the body",
        )
    if "${{" in (body or ""):
        kept_keys.refuse_at(probe, "probes.body", _NOT_EVALUATED)
    if text_at(probe, "ready_after") not in (None, "1"):
        kept_keys.note_at(probe, "probes.ready_after", "a replica is ready after its first answer")
    if text_at(probe, "until_ready") == "True":
        kept_keys.note_at(
            probe, "probes.until_ready", "Cavvy continues to probe a replica after it is ready"
        )
    every_s = _seconds(probe, "interval", _PROBED_EVERY_S)
    return ReadinessProbe(
        path=text_at(probe, "url") or "/",
        every=timedelta(seconds=every_s),
        timeout=timedelta(seconds=_seconds(probe, "timeout", _PROBE_TIMEOUT_S)),
        start=_START,
        headers=_read_headers(probe, values, kept_keys),
        body=(body or "") if method == "post" else None,
    )


def _list_values(root: Node) -> dict[str, str]:
    """Return the environment variables that have a value."""
    env = child(root, "env")
    texts = [as_text(each) for each in items(env) if isinstance(each, ScalarNode)]
    pairs = [each.partition("=") for each in texts]
    values = {name: value for name, equals, value in pairs if equals}
    tables = ((name.text, each) for name, each in entries(env) if isinstance(each, ScalarNode))
    return {**values, **{name: as_text(each) for name, each in tables}}


def _fill_in(text: str | None, values: Mapping[str, str]) -> str | None:
    """Replace the expressions of variables that have a value."""
    if text is None:
        return None
    return _VARIABLE.sub(lambda match: values.get(match[1], match[0]), text)


def _read_headers(
    probe: Node, values: Mapping[str, str], kept_keys: TranslationNotes
) -> tuple[tuple[str, str], ...]:
    found: dict[str, str] = {}
    for each in items(child(probe, "headers")):
        name, value = text_at(each, "name") or "", _fill_in(text_at(each, "value"), values) or ""
        problem = _NOT_EVALUATED if "${{" in value else find_header_problem(name, value)
        if problem:
            kept_keys.refuse(each.mark, "probes.headers", problem)
        found[name] = value
    return tuple(found.items())


def _read_rate(limit: Node, kept_keys: TranslationNotes) -> RequestRate:
    """Return a rate limit with the semantics of nginx: `burst` requests are permitted immediately,
    in addition to the first request.
    """
    key, prefix = child(limit, "key"), (text_at(limit, "prefix") or "/").rstrip("/")
    if not re.fullmatch(r"(/[A-Za-z0-9._~-]+)*", prefix):
        kept_keys.refuse(
            mark_of(limit, "prefix"), "rate_limits.prefix", "the prefix must be a plain path"
        )
    header = text_at(key, "header")
    if header is not None and len(header) > _LONGEST_HEADER:
        longest = f"names of headers have at most {_LONGEST_HEADER} characters"
        kept_keys.refuse_at(key, "rate_limits.key.header", longest)
    elif header is not None and "_" in header:
        kept_keys.refuse_at(
            key,
            "rate_limits.key.header",
            "the gateway does not forward headers whose names contain _",
        )
    return RequestRate(
        requests=float(text_at(limit, "rps") or 1),
        burst=(int_at(limit, "burst") or 0) + 1,
        each=RateScope.HEADER if text_at(key, "type") == "header" else RateScope.ADDRESS,
        header=header,
        prefix=prefix,
    )


def _seconds(table: Node | None, key: str, default: float) -> float:
    node = child(table, key)
    found = read_duration(node) if isinstance(node, ScalarNode) else None
    return default if found is None else float(found)

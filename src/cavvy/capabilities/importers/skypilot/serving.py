"""Translates the section `service` of SkyPilot's files. The defaults come from SkyServe 0.14
(sky/serve/service_spec.py and constants.py).
"""

import json
import math
from datetime import timedelta

from cavvy.capabilities.importers.common_fields import UNBOUNDED, find_header_problem
from cavvy.capabilities.importers.readers import as_text, child, entries, int_at, items, text_at
from cavvy.domain.services import (
    ReadinessProbe,
    ReplicaCount,
    ReplicaTarget,
    ServiceSpec,
    ServiceTimeouts,
    TargetKind,
)
from cavvy.spec.kept_keys import TranslationNotes, mark_of
from cavvy.spec.tree import MapNode, Node, ScalarNode, to_value

_PROBED_EVERY_S, _PROBE_TIMEOUT_S, _START_S = 10.0, 15.0, 1200.0
_UNHEALTHY_S = 180.0
_IDLE_S = 1200.0
_STREAM_S = 120.0
_MARKETS = "the autoscaler itself chooses between spot and on-demand markets"
_NOTED = {
    "upscale_delay_seconds": "the autoscaler waits only as long as the start of a replica takes",
    "num_overprovision": "the autoscaler adds the replicas that it expects to lose",
    "dynamic_ondemand_fallback": _MARKETS,
    "base_ondemand_fallback_replicas": _MARKETS,
    "spot_placer": _MARKETS,
}


def read_service(table: Node, kept_keys: TranslationNotes) -> ServiceSpec | None:
    """Return the service of a task, or None if the file has no service or has a pool of workers."""
    section = child(table, "service")
    if not isinstance(section, MapNode):
        return None
    for key in ("pool", "workers"):
        if child(section, key) is not None:
            reason = "a pool of workers is not a service; `cavvy run` starts single jobs"
            kept_keys.refuse_at(section, f"service.{key}", reason)
            return None
    port = int_at(section, "ports") or _read_port(table, kept_keys)
    if port is None:
        return None
    if _list_ports(table) == [str(port)]:
        kept_keys.forget("resources.ports")
    _note_rest(section, kept_keys)
    return ServiceSpec(
        port=port,
        fixed_port=True,
        replicas=_read_replicas(section, kept_keys),
        concurrency=UNBOUNDED,
        probe=_read_probe(section, kept_keys),
        timeouts=ServiceTimeouts(response=_read_stream_timeout(section)),
    )


def _read_port(table: Node, kept_keys: TranslationNotes) -> int | None:
    """Return the only port of `resources`."""
    found = _list_ports(table)
    if len(found) == 1 and found[0].isdecimal():
        return int(found[0])
    kept_keys.refuse(
        mark_of(table, "service"), "service", "the service has no single port; write `ports: 8080`"
    )
    return None


def _list_ports(table: Node) -> list[str]:
    node = child(child(table, "resources"), "ports")
    return [as_text(each) for each in (*items(node), node) if isinstance(each, ScalarNode)]


def _read_replicas(section: MapNode, kept_keys: TranslationNotes) -> ReplicaCount:
    policy = child(section, "replica_policy")
    if policy is None:
        number = int_at(section, "replicas")
        count = 1 if number is None else number
        return ReplicaCount(least=count, most=max(1, count))
    for key, _ in entries(policy):
        if key.text in _NOTED:
            kept_keys.note(key.mark, f"service.replica_policy.{key.text}", _NOTED[key.text])
    least = int_at(policy, "min_replicas") or 0
    target = ReplicaTarget()
    goal = child(policy, "target_qps_per_replica")
    if isinstance(goal, ScalarNode):
        target = ReplicaTarget(kind=TargetKind.RATE, value=float(goal.text))
        if not target.value:
            kept_keys.refuse(
                goal.mark,
                "service.replica_policy.target_qps_per_replica",
                "with a rate of 0, no number of replicas would be enough",
            )
    elif goal is not None:
        kept_keys.refuse(
            mark_of(policy, "target_qps_per_replica"),
            "service.replica_policy.target_qps_per_replica",
            "a rate for each kind of GPU is not supported; write one number",
        )
    idle_s = float(text_at(policy, "downscale_delay_seconds") or _IDLE_S)
    return ReplicaCount(
        least=least,
        most=max(1, least, int_at(policy, "max_replicas") or 0),
        target=target,
        idle=timedelta(seconds=max(10.0, idle_s)),
    )


def _read_probe(section: MapNode, kept_keys: TranslationNotes) -> ReadinessProbe:
    node = child(section, "readiness_probe")
    path = as_text(node) if isinstance(node, ScalarNode) else text_at(node, "path")

    def seconds(key: str, default: float) -> float:
        return max(0.1, float(text_at(node, key) or default))

    timeout_s = seconds("timeout_seconds", _PROBE_TIMEOUT_S)
    # SkyPilot's next probe begins when the last one has ended
    every_s = max(timeout_s, seconds("endpoint_probe_interval_seconds", _PROBED_EVERY_S))
    lost_s = seconds("consecutive_failure_threshold_timeout", _UNHEALTHY_S)
    return ReadinessProbe(
        path=path or "/",
        every=timedelta(seconds=every_s),
        timeout=timedelta(seconds=timeout_s),
        start=timedelta(seconds=seconds("initial_delay_seconds", _START_S)),
        failures=max(1, math.ceil(lost_s / every_s)),
        headers=_read_headers(node, kept_keys),
        body=_read_body(child(node, "post_data")),
    )


def _read_headers(node: Node | None, kept_keys: TranslationNotes) -> tuple[tuple[str, str], ...]:
    found: dict[str, str] = {}
    for key, value in entries(child(node, "headers")):
        text = as_text(value) if isinstance(value, ScalarNode) else ""
        problem = find_header_problem(key.text, text)
        if "$" in text:
            problem = "the value contains a variable without a value; set the variable with --env"
        if problem:
            kept_keys.refuse(key.mark, "service.readiness_probe.headers", problem)
        found[key.text] = text
    return tuple(found.items())


def _read_body(node: Node | None) -> str | None:
    if node is None:
        return None
    return as_text(node) if isinstance(node, ScalarNode) else json.dumps(to_value(node))


def _read_stream_timeout(section: MapNode) -> timedelta:
    node = child(section, "load_balancer")
    return timedelta(seconds=float(text_at(node, "stream_timeout_seconds") or _STREAM_S))


def _note_rest(section: MapNode, kept_keys: TranslationNotes) -> None:
    balance = text_at(section, "load_balancing_policy")
    if balance not in (None, "least_load"):
        kept_keys.note_at(
            section,
            "service.load_balancing_policy",
            "each request is sent to the replica with the fewest requests",
        )
    if child(section, "tls") is not None:
        kept_keys.note_at(
            section,
            "service.tls",
            "the gateway's certificate is a setting of the server",
        )

"""Translates the metrics of a HorizontalPodAutoscaler to the target of a service."""

import re
from math import isfinite

from cavvy.domain.pod_metrics import GPU_PERCENT
from cavvy.domain.services import ReplicaTarget, TargetKind
from cavvy.importers.kept_keys import TranslationNotes
from cavvy.importers.kubernetes.needs import read_quantity
from cavvy.importers.kubernetes.objects import ServiceObjects, Values, at

_KEY = "HorizontalPodAutoscaler.spec.metrics"
# names that adapters commonly give to the requests per second, to the requests in flight, and to
# the use of the GPUs in percent
_RATE = re.compile(r"requests?_per_sec(ond)?|request_rate|(^|_)[rq]ps($|_)")
_IN_FLIGHT = re.compile(r"in_?flight|concurren|active_requests|requests_active")
_GPU = re.compile(rf"{GPU_PERCENT.lower()}|duty_cycle|gpu_utili[sz]ation")
_PROMETHEUS = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")


def read_target(objects: ServiceObjects, kept_keys: TranslationNotes) -> ReplicaTarget:
    """Return the target of the first metric that a service can have, or the default target. Notes
    say which metrics have no effect.
    """
    spec = at(objects.scaler, "spec")
    found: ReplicaTarget | None = None
    for metric in spec.get("metrics") or ():
        target = _read_metric(metric)
        name = _name(metric)
        if target is None:
            reason = "no target of a service is like it; write `service.replicas.target`"
            kept_keys.note(objects.mark, _KEY, f"{name}: {reason}")
        elif found is not None:
            kept_keys.note(objects.mark, _KEY, f"{name}: a service has one target, the first")
        else:
            found = target
            if target.metric:
                reason = f"the program's /metrics must contain {target.metric}"
                kept_keys.note(objects.mark, _KEY, reason)
    if spec.get("targetCPUUtilizationPercentage"):
        reason = "no target of a service is like it; write `service.replicas.target`"
        kept_keys.note(
            objects.mark, "HorizontalPodAutoscaler.spec.targetCPUUtilizationPercentage", reason
        )
    return found or ReplicaTarget()


def _source(metric: Values) -> Values:
    """Return the table of the metric; its key is the metric's type, with a small first letter."""
    kind = str(metric.get("type", ""))
    return at(metric, kind[:1].lower() + kind[1:])


def _name(metric: Values) -> str:
    source = _source(metric)
    name = at(source, "metric").get("name") or source.get("name")
    return str(name or metric.get("type") or "a metric without a name")


def _read_metric(metric: Values) -> ReplicaTarget | None:
    """Return the target, or None if the metric is not an average over the pods that Cavvy can
    measure.
    """
    source = _source(metric)
    average, name = at(source, "target").get("averageValue"), at(source, "metric").get("name")
    if average is None or not name:
        return None
    value = read_quantity(average)
    if not isfinite(value) or value <= 0:
        return None
    plain = re.sub(r"\W", "_", str(name).lower())
    if _GPU.search(plain):
        share = value / 100 if value > 1 else value
        return ReplicaTarget(kind=TargetKind.GPU_UTILISATION, value=share) if share <= 1 else None
    if _RATE.search(plain):
        return ReplicaTarget(kind=TargetKind.RATE, value=value)
    if _IN_FLIGHT.search(plain):
        return ReplicaTarget(kind=TargetKind.CONCURRENCY, value=value)
    if metric.get("type") != "Pods" or not _PROMETHEUS.fullmatch(str(name)):
        return None
    return ReplicaTarget(kind=TargetKind.METRIC, value=value, metric=str(name))

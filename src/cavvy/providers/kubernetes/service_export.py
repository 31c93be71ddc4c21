"""Exports a service as a Deployment, a Service and a HorizontalPodAutoscaler, built from the
service's pod.
"""

import math
from datetime import timedelta
from typing import Any

from cavvy.domain.services import (
    GPU_PERCENT,
    IN_FLIGHT,
    PER_SECOND,
    RequestLimits,
    ServiceSpec,
    TargetKind,
)

Object = dict[str, Any]

_HTTP_PORT = 80


def make_service(pod: Object, service: ServiceSpec) -> list[Object]:
    """Return the Kubernetes objects of a service whose replicas are copies of `pod`."""
    labels, name = pod["metadata"]["labels"], pod["metadata"]["name"]
    least, most = max(1, service.replicas.least), service.replicas.most
    deployment: Object = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "replicas": least,
            "selector": {"matchLabels": {"app": labels["app"]}},
            "template": {
                "metadata": {key: each for key, each in pod["metadata"].items() if key != "name"},
                "spec": _make_pod_spec(pod["spec"], service),
            },
        },
    }
    front = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "selector": {"app": labels["app"]},
            "ports": [{"name": "http", "port": _HTTP_PORT, "targetPort": service.port}],
        },
    }
    if most <= least:
        return [deployment, front]
    return [deployment, front, _make_scaler(name, labels, service)]


def list_service_notes(service: ServiceSpec) -> list[str]:
    """List the features that the exported objects lack without Cavvy's gateway and autoscaler."""
    scales = service.replicas.most > max(1, service.replicas.least)
    waits = service.replicas.target.kind is TargetKind.QUEUE_WAIT
    notes = {
        f"service.replicas: the cluster needs an adapter that offers the pods' metric "
        f"{_find_metric(service)[0]}, such as the Prometheus adapter": scales,
        f"service.replicas: pods have no queue; the target is {service.concurrency} requests in "
        "flight in each instead of the wait": scales and waits,
        "service.replicas: the cluster always keeps one pod, and never scales to zero": (
            service.replicas.least == 0
        ),
        "service.keys, rate, limits, hosts: pods check none of these; run a gateway in front of "
        "the pods": (
            bool(service.keys or service.rates or service.hosts)
            or service.limits != RequestLimits()
        ),
        "service.probe: probes of pods cannot be POST requests; the pod is ready when the port is "
        "open": service.probe.body is not None,
        "service.batch: without the gateway, requests are not combined into batches": (
            service.batch is not None
        ),
    }
    return [note for note, is_so in notes.items() if is_so]


def _make_pod_spec(spec: Object, service: ServiceSpec) -> Object:
    probe = service.probe
    get: Object = {"httpGet": {"path": probe.path, "port": service.port}}
    if probe.headers:
        get["httpGet"]["httpHeaders"] = [
            {"name": name, "value": value} for name, value in probe.headers
        ]
    rhythm = {"periodSeconds": _whole(probe.every), "timeoutSeconds": _whole(probe.timeout)}
    if probe.any_status or probe.body is not None:
        get = {"tcpSocket": {"port": service.port}}
    first, *others = spec["containers"]
    values = [
        {"name": "PORT", "value": str(service.port)},
        {"name": "SERVE_HOST", "value": "0.0.0.0"},
    ]
    container = {
        **first,
        "env": [
            *(each for each in first["env"] if each["name"] not in ("PORT", "SERVE_HOST")),
            *values,
        ],
        "ports": [{"name": "http", "containerPort": service.port}],
        "readinessProbe": {**get, **rhythm, "failureThreshold": probe.failures},
        "startupProbe": {
            **get,
            **rhythm,
            "failureThreshold": max(1, math.ceil(probe.start / probe.every)),
        },
    }
    kept = {key: each for key, each in spec.items() if key != "activeDeadlineSeconds"}
    return {
        **kept,
        "restartPolicy": "Always",
        "terminationGracePeriodSeconds": _whole(service.drain),
        "containers": [container, *others],
    }


def _make_scaler(name: str, labels: Object, service: ServiceSpec) -> Object:
    metric, value = _find_metric(service)
    quantity = f"{value:.0f}" if value == int(value) else f"{max(1, round(1000 * value))}m"
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": name},
            "minReplicas": max(1, service.replicas.least),
            "maxReplicas": service.replicas.most,
            "metrics": [
                {
                    "type": "Pods",
                    "pods": {
                        "metric": {"name": metric},
                        "target": {"type": "AverageValue", "averageValue": quantity},
                    },
                }
            ],
        },
    }


def _find_metric(service: ServiceSpec) -> tuple[str, float]:
    """Return the metric of the pods that expresses the service's target, and its mean per pod.

    Pods have no queue, so no metric is the wait of requests. A request waits if a pod already has
    as many requests as it processes at once; this number is the target instead.
    """
    target = service.replicas.target
    match target.kind:
        case TargetKind.QUEUE_WAIT:
            return IN_FLIGHT, float(service.concurrency)
        case TargetKind.CONCURRENCY:
            return IN_FLIGHT, target.value
        case TargetKind.RATE:
            return PER_SECOND, target.value
        case TargetKind.GPU_UTILISATION:
            return GPU_PERCENT, 100 * target.value
        case TargetKind.METRIC:
            return str(target.metric), target.value


def _whole(length: timedelta) -> int:
    return max(1, math.ceil(length.total_seconds()))

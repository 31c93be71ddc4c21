"""Exports a service as a Deployment, a Service and a HorizontalPodAutoscaler, built from the
service's pod.
"""

import math
from datetime import timedelta
from typing import Any

from cavvy.domain.services import RequestLimits, ServiceSpec

Object = dict[str, Any]

# percentage of the requested CPUs above which the HorizontalPodAutoscaler adds pods
_CPU_PERCENT = 80
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
    return [deployment, front, _make_scaler(name, labels, least, most)]


def list_service_notes(service: ServiceSpec) -> list[str]:
    """List the features that the exported objects lack without Cavvy's gateway and autoscaler."""
    notes = {
        "service.replicas: the cluster scales by CPU use, not by the service's target": (
            service.replicas.most > max(1, service.replicas.least)
        ),
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


def _make_scaler(name: str, labels: Object, least: int, most: int) -> Object:
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": name},
            "minReplicas": least,
            "maxReplicas": most,
            "metrics": [
                {
                    "type": "Resource",
                    "resource": {
                        "name": "cpu",
                        "target": {"type": "Utilization", "averageUtilization": _CPU_PERCENT},
                    },
                }
            ],
        },
    }


def _whole(length: timedelta) -> int:
    return max(1, math.ceil(length.total_seconds()))

"""Exports a task as manifests for `kubectl apply`, without Cavvy: one pod per node, and a service
if there are several nodes. A service becomes a Deployment.

Exports a service as a Deployment, a Service and a HorizontalPodAutoscaler, built from the
service's pod.
"""

import math
from datetime import timedelta
from typing import Any

import yaml

from cavvy.domain.offers import Offer
from cavvy.domain.services import (
    GPU_PERCENT,
    IN_FLIGHT,
    PER_SECOND,
    RequestLimits,
    ServiceSpec,
    TargetKind,
)
from cavvy.domain.tasks import ResourceSpec, TaskSpec, Volume, VolumeKind
from cavvy.domain.values import replace
from cavvy.providers.base import Refused
from cavvy.providers.batch.export import (
    MASTER_PORT,
    list_general_notes,
    list_variables,
    make_work,
    take_first_choice,
)
from cavvy.providers.batch.shapes import NodeShape
from cavvy.providers.formats.notes import LiteralDumper
from cavvy.providers.formats.program import escape_references, list_start_lines
from cavvy.providers.kubernetes.cluster import KubernetesNode, find_resource
from cavvy.providers.kubernetes.device_claims import add_claim, make_template
from cavvy.providers.kubernetes.docker_sidecar import overlay_task
from cavvy.providers.kubernetes.options import PodOptions
from cavvy.providers.kubernetes.pod_fields import overlay_pod
from cavvy.providers.kubernetes.pods import (
    CONTAINER,
    NO_ACCELERATORS,
    SHM,
    SHM_SOURCE,
    join_queue,
    make_claim,
    make_place,
    make_resources,
    make_volumes,
)
from cavvy.providers.kubernetes.topology import place_together
from cavvy.spec.support import read_options as read_task_options

Object = dict[str, Any]

_LONGEST_LABEL = 63  # characters of a DNS label: RFC 1035, section 2.3.4
# The shell stays the pod's first process and passes SIGTERM on, because the kernel drops a SIGTERM
# for a first process that does not handle it.
_SHELL = "\n".join([*list_start_lines("$0"), 'exit "$CAVVY_CODE"'])

_HTTP_PORT = 80


def make_export(
    task: TaskSpec,
    offer: Offer | None,
    nodes: int,
    options: PodOptions,
    node: KubernetesNode | None = None,
) -> str:
    """Return the manifests as YAML documents. `node` is one of the offer's nodes. Comments at the
    top list the features that the pods lack without Cavvy. Raises Refused.
    """
    if task.service is not None and nodes > 1:
        raise Refused(
            "a Deployment has one pod for each replica, and this service's replicas have "
            f"{nodes} nodes; set nodes: 1"
        )
    if offer is None:
        task = take_first_choice(task)
    given, task = task.name, replace(task, name=_choose_name(task, nodes))
    documents = [] if nodes == 1 else [_service(task)]
    documents += [make_claim(each, nodes) for each in _list_volumes(task) if _is_new(each)]
    place = node or _guess_node(task.resources)
    if place.claim and (count := _size(task.resources, offer)[2]):
        documents.append(make_template(task.name, place.claim, count))
    own = read_task_options(task.resources, "kubernetes")
    pods = [_pod(task, offer, rank, nodes, options, place) for rank in range(nodes)]
    made = [overlay_task(overlay_pod(each, options.pod), own, task.project) for each in pods]
    left_out = [*_list_name_notes(given, task.name), *_list_left_out(task, place)]
    if task.service is not None:
        made = make_service(made[0], task.service)
        left_out += list_service_notes(task.service)
    documents += made
    notes = [f"# {note}" for note in left_out]
    return "\n".join([*notes, yaml.dump_all(documents, Dumper=LiteralDumper, sort_keys=False)])


def _choose_name(task: TaskSpec, nodes: int) -> str:
    """Return the task's name, changed if necessary: the name of a Service begins with a letter, and
    the host names of pods end with the rank
    (https://kubernetes.io/docs/concepts/overview/working-with-objects/names).
    """
    if nodes == 1 and task.service is None:
        return task.name
    name = task.name if task.name[0].isalpha() else f"job-{task.name}"
    ending = len(f"-{nodes - 1}") if nodes > 1 else 0
    return name[: _LONGEST_LABEL - ending].rstrip("-")


def _list_name_notes(given: str, name: str) -> list[str]:
    changed = f"name: Kubernetes does not accept the name {given} here; the objects have the name "
    return [] if given == name else [f"{changed}{name}"]


def _list_left_out(task: TaskSpec, node: KubernetesNode) -> list[str]:
    needs = [need.name for need in task.resources.accelerators[:1] if need.name]
    values = " ".join(f"--from-literal={name}=..." for name in task.secrets)
    wanted = {
        f"secrets: kubectl create secret generic {task.name}-secrets {values}": bool(task.secrets),
        f"resources.gpu: any {node.resource} is accepted; add a nodeSelector for "
        f"{', '.join(needs)}": bool(needs and not node.label and not node.claim),
        "workdir: pods do not fetch the folder; copy it into the image or a volume": task.workdir
        is not None,
        "image: build and push the Dockerfile's image; name it in each container": task.image_build
        is not None,
        "volumes: a volume whose source or path is in the working folder is omitted": any(
            not each.path.startswith("/") or each.kind is VolumeKind.FOLDER for each in task.volumes
        ),
        "inputs, outputs: the pods do not copy these files": bool(task.inputs or task.outputs),
        "checkpoint: an ended pod loses its files; write checkpoints to a volume": task.checkpoint
        is not None,
        "retry: an ended pod is not started again": task.service is None,
        "setup: runs each time a pod starts": task.setup is not None,
    }
    absent = [each.source for each in _list_volumes(task) if _is_claimed(each)]
    if absent:
        wanted[f"volumes: create the PersistentVolumeClaims {', '.join(absent)} first"] = True
    return [note for note, is_so in wanted.items() if is_so] + list_general_notes(task)


def _is_new(volume: Volume) -> bool:
    return volume.kind is VolumeKind.NAMED and bool(volume.size_gib)


def _is_claimed(volume: Volume) -> bool:
    return volume.kind is VolumeKind.NAMED and not volume.size_gib


def _service(task: TaskSpec) -> Object:
    """Return a headless service, which gives the pods host names so that they can find each
    other."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": task.name},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"app": task.name},
            "ports": [{"name": "master", "port": MASTER_PORT}],
        },
    }


def _pod(
    task: TaskSpec,
    offer: Offer | None,
    rank: int,
    nodes: int,
    options: PodOptions,
    node: KubernetesNode,
) -> Object:
    name = task.name if nodes == 1 else f"{task.name}-{rank}"
    metadata: Object = {"name": name, "labels": {"app": task.name}}
    join_queue(metadata, options.queue, task.name, nodes)
    cpus, memory_mib, count = _size(task.resources, offer)
    container: Object = {
        "name": CONTAINER,
        "image": task.image or options.image,
        "command": ["sh", "-c", escape_references(_SHELL), escape_references(make_work(task))],
        "env": _environment(task, rank, nodes, count),
        "resources": make_resources(cpus, memory_mib, node.resource, 0 if node.claim else count),
    }
    place = make_place(count, node, options)
    spec: Object = {**place, "containers": [container]}
    if node.claim and count:
        add_claim(spec, container, task.name)
    if task.limits.duration:
        spec["activeDeadlineSeconds"] = math.ceil(task.limits.duration.total_seconds())
    spec["terminationGracePeriodSeconds"] = math.ceil(task.grace.total_seconds())
    if nodes > 1:
        spec |= {"hostname": name, "subdomain": task.name}
    volumes = _list_volumes(task)
    spec["volumes"], container["volumeMounts"] = make_volumes(volumes)
    if all(each.path.rstrip("/") != SHM for each in volumes):
        spec["volumes"].append({"name": "shm", **SHM_SOURCE})
        container["volumeMounts"].append({"name": "shm", "mountPath": SHM})
    pod: Object = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
    if task.topology is not None and nodes > 1:
        place_together(pod, task.topology, rank, {"app": task.name}, options.topology)
    return pod


def _list_volumes(task: TaskSpec) -> list[Volume]:
    """Return the task's volumes that a pod can mount."""
    return [
        each
        for each in task.volumes
        if each.kind is not VolumeKind.FOLDER and each.path.startswith("/")
    ]


def _environment(task: TaskSpec, rank: int, nodes: int, count: int) -> list[Object]:
    hosts = (
        [f"{task.name}-{each}.{task.name}" for each in range(nodes)] if nodes > 1 else ["127.0.0.1"]
    )
    values = {
        **({} if count else {NO_ACCELERATORS["name"]: NO_ACCELERATORS["value"]}),
        **list_variables(task, nodes),
        "MASTER_ADDR": hosts[0],
        "CAVVY_HOSTS": ",".join(hosts),
        "NODE_RANK": str(rank),
        "NPROC_PER_NODE": str(count or 1),
    }
    secrets = [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": f"{task.name}-secrets", "key": name}}}
        for name in task.secrets
    ]
    return [
        *({"name": name, "value": escape_references(value)} for name, value in values.items()),
        *secrets,
    ]


def _size(resources: ResourceSpec, offer: Offer | None) -> tuple[float, int, int]:
    if offer is not None:
        return offer.vcpus, offer.memory_mib, offer.accelerator_count
    count = resources.accelerators[0].count_min if resources.accelerators else 0
    cpus = resources.cpus_min or 1
    return cpus, resources.least_memory_mib(cpus), count


def _guess_node(need: ResourceSpec) -> KubernetesNode:
    """Return an assumed node, for use when the cluster is unknown. The node's accelerators have the
    resource name that the vendor's device plugin uses.
    """
    first = need.accelerators[0] if need.accelerators else None
    resource = find_resource((first.name if first is not None else None) or "")
    shape = NodeShape(cpus=0, memory_mib=0, gpus=first.count_min if first else 0, gpu="")
    return KubernetesNode(name="", resource=resource if first is not None else "", shape=shape)


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

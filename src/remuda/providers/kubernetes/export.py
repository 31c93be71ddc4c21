"""A task as manifests for `kubectl apply`, without Remuda: a pod for each node, and a service where they are many."""

import math
from typing import Any

import yaml

from remuda.domain.offers import Offer
from remuda.domain.tasks import Resources, Task, VolumeKind
from remuda.providers.batch.shapes import Shape
from remuda.providers.kubernetes.cluster import ClusterNode
from remuda.providers.kubernetes.pods import CONTAINER, make_mount, make_place, make_resources, make_source
from remuda.providers.kubernetes.wishes import Wishes

Object = dict[str, Any]

_PORT = 29500
_TIME_LIMIT_S = 24 * 3600


def make_export(task: Task, offer: Offer | None, nodes: int, wishes: Wishes) -> str:
    """YAML documents. What only Remuda can do is named in comments at the top."""
    documents = [] if nodes == 1 else [_service(task)]
    documents += [_pod(task, offer, rank, nodes, wishes) for rank in range(nodes)]
    notes = [f"# {note}" for note in _list_left_out(task)]
    return "\n".join([*notes, yaml.safe_dump_all(documents, sort_keys=False)])


def _list_left_out(task: Task) -> list[str]:
    wanted = {
        "workdir: copy the folder into the image or a volume; nothing is fetched": task.workdir is not None,
        "image: build your Dockerfile, push it, and name it in each container": task.image_build is not None,
        "volumes within the working folder, and parts of it under other paths, stay out": any(
            not each.path.startswith("/") or each.kind is VolumeKind.FOLDER for each in task.volumes
        ),
        "inputs, outputs: nothing is copied": bool(task.inputs or task.outputs),
        "checkpoint: nothing is kept when the pod goes; write to a volume": task.checkpoint is not None,
        "retry: a pod that ends is not started again": True,
        "setup runs at each start": task.setup is not None,
    }
    return [note for note, is_so in wanted.items() if is_so]


def _service(task: Task) -> Object:
    """Gives the pods names under which they find each other."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": task.name},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"app": task.name},
            "ports": [{"name": "master", "port": _PORT}],
        },
    }


def _pod(task: Task, offer: Offer | None, rank: int, nodes: int, wishes: Wishes) -> Object:
    name = task.name if nodes == 1 else f"{task.name}-{rank}"
    metadata: Object = {"name": name, "labels": {"app": task.name}}
    if wishes.queue:
        metadata["labels"] |= {"kueue.x-k8s.io/queue-name": wishes.queue}
        if nodes > 1:
            metadata["labels"] |= {"kueue.x-k8s.io/pod-group-name": task.name}
            metadata["annotations"] = {"kueue.x-k8s.io/pod-group-total-count": str(nodes)}
    cpus, memory_mib, count = _size(task.resources, offer)
    container: Object = {
        "name": CONTAINER,
        "image": task.image or wishes.image,
        "command": ["sh", "-c", "\n".join(filter(None, ["set -e", task.setup, task.run]))],
        "env": _environment(task, rank, nodes, count),
        "resources": make_resources(cpus, memory_mib, "nvidia.com/gpu", count),
    }
    place = make_place(count, _any_node(count), wishes)
    spec: Object = {**place, "containers": [container]}
    spec["activeDeadlineSeconds"] = int(task.limits.duration.total_seconds() if task.limits.duration else _TIME_LIMIT_S)
    spec["terminationGracePeriodSeconds"] = math.ceil(task.grace.total_seconds())
    if nodes > 1:
        spec |= {"hostname": name, "subdomain": task.name}
    volumes = [each for each in task.volumes if each.kind is not VolumeKind.FOLDER and each.path.startswith("/")]
    if volumes:
        container["volumeMounts"] = [make_mount(number, volume) for number, volume in enumerate(volumes)]
        spec["volumes"] = [{"name": f"volume-{n}", **make_source(volume)} for n, volume in enumerate(volumes)]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _environment(task: Task, rank: int, nodes: int, count: int) -> list[Object]:
    first = f"{task.name}-0.{task.name}" if nodes > 1 else "127.0.0.1"
    values = {
        **task.env,
        **{f"REMUDA_PARAM_{name.upper()}": str(value) for name, value in task.params.items()},
        "MASTER_ADDR": first,
        "MASTER_PORT": str(_PORT),
        "NODE_RANK": str(rank),
        "NNODES": str(nodes),
        "NPROC_PER_NODE": str(count or 1),
    }
    secrets = [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": f"{task.name}-secrets", "key": name}}}
        for name in task.secrets
    ]
    return [*({"name": name, "value": value} for name, value in values.items()), *secrets]


def _size(resources: Resources, offer: Offer | None) -> tuple[float, int, int]:
    if offer is not None:
        return offer.vcpus, offer.memory_mib, offer.accelerator_count
    count = resources.accelerators[0].count_min if resources.accelerators else 0
    return resources.cpus_min or 1, resources.memory_min_mib or 1024, count


def _any_node(count: int) -> ClusterNode:
    """What is known of the nodes where nobody was asked: that they hand out GPUs under their usual name."""
    shape = Shape(cpus=0, memory_mib=0, gpus=count, gpu="")
    return ClusterNode(name="", resource="nvidia.com/gpu" if count else "", shape=shape)

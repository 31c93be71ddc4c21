"""Builds the objects of a gang: its record, its secret, one pod per rank, and the config map with
the files that pods run.
"""

import base64
import hashlib
import importlib.util
import json
import re
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from cavvy.domain.tasks import Volume, VolumeKind
from cavvy.domain.values import Struct
from cavvy.providers.base import GangSpec
from cavvy.providers.kubernetes.cluster import SPOT, DeviceClaim, KubernetesNode
from cavvy.providers.kubernetes.compiled import compile_archive
from cavvy.providers.kubernetes.device_claims import add_claim, make_template
from cavvy.providers.kubernetes.docker_sidecar import overlay_task
from cavvy.providers.kubernetes.options import PodOptions
from cavvy.providers.kubernetes.pod_fields import overlay_pod
from cavvy.providers.kubernetes.topology import place_together

Object = dict[str, Any]

CONTAINER = "work"
INSTALLATION, GANG, RANK = "cavvy/installation", "cavvy/gang", "cavvy/rank"
# Without this volume, /dev/shm has the container runtime's 64 MiB, too few for loaders of data and
# for communication between GPUs.
SHM = "/dev/shm"
SHM_SOURCE: Object = {"emptyDir": {"medium": "Memory"}}
# Without this variable, some images make all GPUs of the node visible.
NO_ACCELERATORS: Object = {"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}
RESERVE = timedelta(seconds=15)  # time for the agent's last messages after the work's grace period
_LEAST_GRACE = timedelta(seconds=30)  # Kubernetes' own default
# extra time in the pod's active deadline, because pulling images counts for the deadline
_BOOT = timedelta(minutes=25)
_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_RUN = "/cavvy/run"
_POD = Path(__file__).parent / "pod"
_FILES = ("init.py", "boot.sh", "tunnel.sh", "tunnel.py")


class OwnerObject(Struct, frozen=True, kw_only=True):
    """The config map with a gang's record. The config map owns the gang's other objects, so
    Kubernetes deletes these objects when the config map is deleted.
    """

    name: str
    uid: str

    @property
    def reference(self) -> Object:
        return {"apiVersion": "v1", "kind": "ConfigMap", "name": self.name, "uid": self.uid}


def labels_of(mark: str, gang: str) -> dict[str, str]:
    """Return the labels that all objects of a gang have."""
    return {"app.kubernetes.io/managed-by": "cavvy", INSTALLATION: mark, GANG: gang}


def pod_name(gang: str, rank: int, turn: int = 0) -> str:
    """Return the name of a rank's pod. `turn` is how many of its pods were replaced before."""
    return f"{gang}-{rank}-r{turn}" if turn else f"{gang}-{rank}"


def secret_name(gang: str, number: int = 0) -> str:
    """Return the name of the secret with the configuration of a gang's agents, or of those that a
    round with this number (`GangSpec.round`) has started instead of lost ones.
    """
    return f"{gang}-r{number}" if number else gang


def _secret_of(spec: GangSpec) -> str:
    return secret_name(spec.name, spec.round if spec.renews else 0)


def make_record(spec: GangSpec, mark: str, asked_at: str, pool: str) -> Object:
    """Return the config map with the gang's record. Creating the config map is the first step of a
    launch. If `pool` is set, the gang waits for the pool's autoscaler.
    """
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": spec.name, "labels": labels_of(mark, spec.name)},
        "data": {"nodes": str(spec.nodes), "asked_at": asked_at, "pool": pool},
    }


def make_secret(spec: GangSpec, mark: str, owner: OwnerObject) -> Object:
    """Return the secret with the configuration of the gang's agents."""
    grace = _grace(spec)
    config = {
        "protocol": 1,
        "gang": spec.name,
        "token": spec.agent_endpoint.token,
        "cache": f"{_RUN}/cache",
        "lease_s": spec.lease.total_seconds(),
        "grace_s": spec.grace.total_seconds(),
        "memory_mib": 0,  # 0: the pod's own memory limit applies
        "boxed": True,
        "taken": {"seconds": (grace - RESERVE / 3).total_seconds(), "source": "Kubernetes"},
    }
    if not spec.offer.accelerator_count:
        config["devices"] = []
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": _secret_of(spec),
            "labels": labels_of(mark, spec.name),
            "ownerReferences": [owner.reference],
        },
        "stringData": {
            "config.json": json.dumps(config),
            "patience_s": str((spec.lease + spec.grace).total_seconds()),
        },
    }


def make_pod(
    spec: GangSpec,
    rank: int,
    mark: str,
    owner: OwnerObject,
    node: KubernetesNode,
    options: PodOptions,
    agent: str,
    turn: int = 0,
) -> Object:
    """Return the pod of one rank. `node` is one of the offer's nodes; `agent` is the name of the
    config map with the files that pods run; see `pod_name` for `turn`.
    """
    metadata: Object = {
        "name": pod_name(spec.name, rank, turn),
        "labels": {**labels_of(mark, spec.name), RANK: str(rank), **_plain(spec.labels)},
        "annotations": {"cavvy/labels": json.dumps(dict(spec.labels), sort_keys=True)},
        "ownerReferences": [owner.reference],
    }
    join_queue(metadata, options.queue, spec.name, spec.nodes)
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": _pod_spec(spec, rank, node, options, agent),
    }
    if spec.topology is not None:
        place_together(pod, spec.topology, rank, labels_of(mark, spec.name), options.topology)
    pod = overlay_pod(pod, options.pod) if options.pod else pod
    return overlay_task(pod, spec.options, spec.labels.get("project", "default"))


def _pod_spec(
    spec: GangSpec, rank: int, node: KubernetesNode, options: PodOptions, agent: str
) -> Object:
    volumes, mounts = _list_volumes(spec, agent)
    env: list[Object] = [
        {"name": "CAVVY_POD_RANK", "value": str(rank)},
        {"name": "CAVVY_POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
    ]
    if not spec.offer.accelerator_count:
        env.append(NO_ACCELERATORS)
    container: Object = {
        "name": CONTAINER,
        "image": spec.image or options.image,
        "command": ["sh", "/cavvy/agent/boot.sh"],
        "env": env,
        "resources": make_resources(
            spec.offer.vcpus,
            spec.offer.memory_mib,
            node.resource,
            0 if node.claim else spec.offer.accelerator_count,
        ),
        "volumeMounts": mounts,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    if spec.nodes > 1:
        rdma = node.request_rdma(spec.offer.accelerator_count)
        for kind in ("requests", "limits") if rdma else ():
            container["resources"].setdefault(kind, {}).update(rdma)
    pod = {
        **make_place(spec.offer.accelerator_count, node, options),
        "containers": [container],
        "volumes": volumes,
        "terminationGracePeriodSeconds": int(_grace(spec).total_seconds()),
        **_deadline(spec),
    }
    if node.claim and spec.offer.accelerator_count:
        add_claim(pod, container, spec.name)
    return pod


def make_claim_template(
    spec: GangSpec, mark: str, owner: OwnerObject, claim: DeviceClaim
) -> Object:
    """Return the template of the claims of a gang's pods."""
    metadata = {"labels": labels_of(mark, spec.name), "ownerReferences": [owner.reference]}
    return make_template(spec.name, claim, spec.offer.accelerator_count, metadata)


def _list_volumes(spec: GangSpec, agent: str) -> tuple[list[Object], list[Object]]:
    """Return the volumes of a gang's pod, and the mounts of its container."""
    secret = {"secretName": _secret_of(spec), "defaultMode": 0o444}
    own: tuple[tuple[str, Object, Object], ...] = (
        ("agent", {"configMap": {"name": agent}}, {"mountPath": "/cavvy/agent", "readOnly": True}),
        ("gang", {"secret": secret}, {"mountPath": "/cavvy/gang", "readOnly": True}),
        ("run", {"emptyDir": {}}, {"mountPath": _RUN}),
        ("shm", SHM_SOURCE, {"mountPath": SHM}),
    )
    volumes, mounts = make_volumes(spec.volumes)
    volumes = [{"name": f"cavvy-{name}", **source} for name, source, _ in own] + volumes
    mounts = [{"name": f"cavvy-{name}", **mount} for name, _, mount in own] + mounts
    return volumes, mounts


def join_queue(metadata: Object, queue: str, group: str, nodes: int) -> None:
    """Label a pod so that Kueue admits all pods of its group at the same time. Does nothing if
    `queue` is "".
    """
    if queue:
        metadata["labels"] |= {
            "kueue.x-k8s.io/queue-name": queue,
            "kueue.x-k8s.io/pod-group-name": group,
        }
        # Kueue would keep the quota and the failed pods of a group that it may retry.
        metadata["annotations"] = metadata.get("annotations", {}) | {
            "kueue.x-k8s.io/pod-group-total-count": str(nodes),
            "kueue.x-k8s.io/retriable-in-group": "false",
        }


def make_resources(cpus: float, memory_mib: int, resource: str, count: int) -> Object:
    """Return a container's resources. Memory and accelerators are limits; CPUs are a request that
    the container may exceed. A `memory_mib` of 0 sets no limit.
    """
    limits: Object = {"memory": f"{memory_mib}Mi"} if memory_mib else {}
    if count:
        limits[resource] = str(count)
    requests = {"cpu": f"{round(cpus * 1000)}m", **limits}
    return {"requests": requests, "limits": limits} if limits else {"requests": requests}


def make_place(accelerators: int, node: KubernetesNode | None, options: PodOptions) -> Object:
    """Return the fields of a pod's spec that determine its node and its service account."""
    tolerations = [each.object for each in options.tolerations]
    if accelerators and node is not None:
        key = "nvidia.com/gpu" if node.claim else node.resource
        tolerations.append({"key": key, "operator": "Exists"})
    for key in ("not-ready", "unreachable"):
        tolerations.append(
            {
                "key": f"node.kubernetes.io/{key}",
                "operator": "Exists",
                "effect": "NoExecute",
                "tolerationSeconds": options.lost_after_s,
            }
        )
    found: Object = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": bool(options.service_account),
        "enableServiceLinks": False,
        "tolerations": tolerations,
    }
    rules = _rules(accelerators, node) if node is not None else []
    if rules:
        terms = {"nodeSelectorTerms": [{"matchExpressions": rules}]}
        found["affinity"] = {
            "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}
        }
    more: Mapping[str, object] = {
        "nodeSelector": dict(options.selector),
        "serviceAccountName": options.service_account,
        "priorityClassName": options.priority_class,
        "runtimeClassName": options.runtime_class,
        "schedulerName": options.scheduler,
        "imagePullSecrets": [{"name": name} for name in options.pull_secrets],
    }
    return {**found, **{name: value for name, value in more.items() if value}}


def _rules(accelerators: int, node: KubernetesNode) -> Sequence[Object]:
    rules: list[Object] = []
    if accelerators and node.label:
        rules.append({"key": node.label, "operator": "In", "values": [node.label_value]})
    if node.spot_label:
        rules.append({"key": node.spot_label, "operator": "In", "values": [node.spot_value]})
    elif accelerators:
        spot = {key: [value, value.upper()] for key, value in SPOT}
        rules += [
            {"key": key, "operator": "NotIn", "values": values} for key, values in spot.items()
        ]
    return rules


def make_volumes(volumes: Sequence[Volume]) -> tuple[list[Object], list[Object]]:
    """Return the volumes of a pod, and their mounts in the container."""
    sources = [{"name": f"volume-{n}", **make_source(each)} for n, each in enumerate(volumes)]
    return sources, [make_mount(n, each) for n, each in enumerate(volumes)]


def make_source(volume: Volume) -> Object:
    """Return the source of a volume's files, as a field of a pod's spec. Raises ValueError for a
    folder volume, because the agent provides folder volumes.
    """
    match volume.kind:
        case VolumeKind.NAMED:
            return {
                "persistentVolumeClaim": {"claimName": volume.source, "readOnly": volume.read_only}
            }
        case VolumeKind.HOST:
            return {"hostPath": {"path": volume.source}}
        case VolumeKind.NFS:
            server, _, path = volume.source.partition(":")
            return {"nfs": {"server": server, "path": path, "readOnly": volume.read_only}}
        case VolumeKind.FOLDER:
            raise ValueError(
                f"{volume.source} is a folder in the working folder; the agent provides such "
                "folders"
            )


def make_mount(number: int, volume: Volume) -> Object:
    """Return the mount of a volume in the container."""
    # A volume within the working folder is mounted outside it: the agent creates the working
    # folder, and links the volume into it.
    beside = f"/cavvy/volumes/{hashlib.sha256(volume.path.encode()).hexdigest()[:12]}"
    inside = volume.path if volume.path.startswith("/") else beside
    return {"name": f"volume-{number}", "mountPath": inside, "readOnly": volume.read_only}


def make_claim(volume: Volume, nodes: int) -> Object:
    """Return a PersistentVolumeClaim for a named volume that does not exist yet. The claim remains
    after the gang has ended.
    """
    spec: Object = {
        "accessModes": ["ReadWriteMany" if nodes > 1 else "ReadWriteOnce"],
        "resources": {"requests": {"storage": f"{volume.size_gib}Gi"}},
    }
    if volume.type:
        spec["storageClassName"] = volume.type
    metadata = {"name": volume.source, "labels": {"app.kubernetes.io/managed-by": "cavvy"}}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}


def _plain(labels: Mapping[str, str]) -> dict[str, str]:
    """Return the user's tags that are valid as Kubernetes labels. All tags are also stored in an
    annotation.
    """
    fit = {
        name: value
        for name, value in labels.items()
        if _LABEL.fullmatch(name) and _LABEL.fullmatch(value)
    }
    return {f"cavvy.tag/{name}": value for name, value in fit.items()}


def _grace(spec: GangSpec) -> timedelta:
    return max(_LEAST_GRACE, spec.grace + RESERVE)


def _deadline(spec: GangSpec) -> Object:
    """Return the pod's field `activeDeadlineSeconds`, after which the kubelet ends the pod, or {}
    if the work has no time limit.
    """
    if spec.longest is None:
        return {}
    whole = spec.longest + _BOOT + _grace(spec) + RESERVE
    return {"activeDeadlineSeconds": int(whole.total_seconds())}


def make_bundle(archive: bytes) -> dict[str, Any]:
    """Make the config map with the files that pods run: the agent, with bytecode for this server's
    Python version, and the programs in `pod/`. Its name contains a hash of its content.
    """
    texts = {name: (_POD / name).read_text(encoding="utf-8") for name in _FILES}
    content = hashlib.sha256(
        archive + "".join(texts.values()).encode() + importlib.util.MAGIC_NUMBER
    ).hexdigest()
    name = f"cavvy-agent-{content[:12]}"
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "labels": {"app.kubernetes.io/managed-by": "cavvy"}},
        "data": texts,
        "binaryData": {"agent.pyz": base64.b64encode(compile_archive(archive)).decode()},
        "immutable": True,
    }

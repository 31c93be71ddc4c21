"""Translates a RayJob or a RayCluster of KubeRay to a task: each node starts Ray, the first one as
the head, which runs the entrypoint.

What the operator does is in https://docs.ray.io/en/latest/cluster/kubernetes.
"""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from cavvy.capabilities.importers.kubernetes.objects import (
    JobObject,
    PodKeys,
    Values,
    at,
    keep_table,
)
from cavvy.capabilities.importers.plain_yaml import load_plain
from cavvy.domain.tasks import RetryPolicy, TaskSpec
from cavvy.domain.values import replace
from cavvy.spec.kept_keys import TranslationNotes

PodReader = Callable[[JobObject, Values, TranslationNotes], TaskSpec | None]
RAY_KINDS = ("RayJob", "RayCluster")
_GONE = "the job ends when its entrypoint does, and its nodes with it"
_OF_JOB = PodKeys(
    read=("entrypoint", "runtimeEnvYAML", "rayClusterSpec", "jobId", "backoffLimit"),
    noted={
        "shutdownAfterJobFinishes": _GONE,
        "ttlSecondsAfterFinished": _GONE,
        "submissionMode": "the head's node runs the entrypoint",
        "submitterPodTemplate": "the head's node runs the entrypoint",
        "submitterConfig": "the head's node runs the entrypoint",
        "deletionStrategy": _GONE,
        "deletionPolicy": _GONE,
        "metadata": "`tags` describe a job",
        **dict.fromkeys(
            ("entrypointNumCpus", "entrypointNumGpus", "entrypointResources"),
            "the entrypoint runs on the head's node",
        ),
    },
    refused={
        "suspend": "a suspended job does not start; delete the key",
        "clusterSelector": "Cavvy knows no Ray cluster of this name; write `rayClusterSpec`",
        "runtimeEnv": "a coded form that KubeRay has removed; write `runtimeEnvYAML`",
        "activeDeadlineSeconds": "write `limits` in a Cavvy file",
        "managedBy": "the controller does not exist here",
    },
)
_OF_CLUSTER = PodKeys(
    read=("rayVersion", "headGroupSpec", "workerGroupSpecs"),
    noted={
        "enableInTreeAutoscaling": "the number of nodes of a job is fixed",
        "autoscalerOptions": "the number of nodes of a job is fixed",
        "headServiceAnnotations": "`cavvy forward` reaches the ports of a job",
    },
    refused={
        "suspend": "a suspended cluster does not start; delete the key",
        "gcsFaultToleranceOptions": "a job whose head is lost starts again from its beginning",
        "managedBy": "the controller does not exist here",
        "authOptions": "only the nodes of the job reach its Ray",
    },
)
_OF_GROUP = PodKeys(
    read=("groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"),
    noted={
        "serviceType": "`cavvy forward` reaches the ports of a job",
        "headService": "`cavvy forward` reaches the ports of a job",
        "enableIngress": "`cavvy forward` reaches the ports of a job",
        "scaleStrategy": "the number of nodes of a job is fixed",
        "idleTimeoutSeconds": "the number of nodes of a job is fixed",
    },
    refused={"numOfHosts": "workers of several pods; write `replicas` for all of them"},
)
_OURS = ("dashboard-host", "block", "address", "port", "head", "node-ip-address")
_RUN = """\
export RAY_ADDRESS="$MASTER_ADDR:6379" PYTHONUNBUFFERED=1
if [ "$NODE_RANK" != 0 ]; then
{choose}  until ray start --address "$RAY_ADDRESS" {worker}>/dev/null 2>&1; do sleep 2; done
  while ray health-check --address "$RAY_ADDRESS" >/dev/null 2>&1; do sleep 5; done
  exit 0
fi
ray start --head --port 6379 --dashboard-host 0.0.0.0 {head}|| exit
"""
_WAIT = """\
python3 - "$NNODES" <<'_CAVVY_RAY' || exit
import sys, time, ray
ray.init(address="auto", log_to_driver=False)
end = time.monotonic() + 1800
while sum(node["Alive"] for node in ray.nodes()) < int(sys.argv[1]):
    if time.monotonic() > end:
        sys.exit("not all nodes have joined the Ray cluster within 30 minutes")
    time.sleep(1)
_CAVVY_RAY
"""
_SUBMIT = """\
RAY_ADDRESS=http://127.0.0.1:8265 ray job submit {options}-- sh -c {entrypoint}
_code=$?
ray stop --grace-period 5 >/dev/null 2>&1
exit $_code
"""
_STAY = "trap 'ray stop; exit 143' TERM\nwhile :; do sleep 3600 & wait $!; done\n"


def read_ray(job: JobObject, read_pod: PodReader, kept: TranslationNotes) -> TaskSpec | None:
    """Return the task of a RayJob or a RayCluster. `read_pod` reads a pod's template."""
    spec, where = at(job.values, "spec"), "spec"
    retry = RetryPolicy(exit=0)
    if job.kind == "RayJob":
        keep_table(job.mark, spec, _OF_JOB, "spec", kept)
        if not spec.get("entrypoint"):
            kept.refuse(job.mark, "spec.entrypoint", "expected the command of the job")
            return None
        retry = RetryPolicy(exit=int(spec.get("backoffLimit", 0)))
        cluster, where = at(spec, "rayClusterSpec"), "spec.rayClusterSpec"
    else:
        cluster = spec
    keep_table(job.mark, cluster, _OF_CLUSTER, where, kept)
    head = at(cluster, "headGroupSpec")
    if not head:
        kept.refuse(job.mark, f"{where}.headGroupSpec", "expected the group of the head")
        return None
    workers: Sequence[Values] = cluster.get("workerGroupSpecs") or ()
    for key, group in (("headGroupSpec", head), *(("workerGroupSpecs", each) for each in workers)):
        keep_table(job.mark, group, _OF_GROUP, f"{where}.{key}", kept)
    task = read_pod(job, _join_pods(job, head, workers, where, kept), kept)
    if task is None:
        return None
    run = task.run.removesuffix(_NO_COMMAND)  # what comes before it: files, init containers
    choose, of_worker = _write_groups(workers)
    run += _RUN.format(head=_write_params(head), choose=choose, worker=of_worker)
    count = sum(map(_count, workers))
    if job.kind == "RayJob":
        run += _WAIT if count else ""
        run += _SUBMIT.format(
            options=_read_runtime(job, spec, kept), entrypoint=quote(str(spec["entrypoint"]))
        )
    else:
        run += _STAY
    return replace(task, nodes=1 + count, run=run, retry=retry)


_NO_COMMAND = "exec true"


def _join_pods(
    job: JobObject, head: Values, groups: Sequence[Values], where: str, kept: TranslationNotes
) -> Values:
    """Return the template of a pod that fits the head and the workers: the larger of what they
    need, since all nodes of a job are alike.
    """
    first, *others = (at(each, "template") for each in (head, *groups) if each)
    containers: list[Values] = []
    for each in (first, *others):
        _sort_pod(job, at(each, "spec"), where, kept)
        containers.append((at(each, "spec").get("containers") or [{}])[0])
    images = {str(each.get("image")) for each in containers}
    if len(images) > 1:
        reason = f"head and workers have different images ({' and '.join(sorted(images))}), and "
        kept.refuse(job.mark, f"{where}.workerGroupSpecs", f"{reason}all nodes of a job are alike")
    for key in ("command", "args"):
        if any(each.get(key) for each in containers):
            under = f"{where}.headGroupSpec.template.spec.containers.{key}"
            kept.refuse(job.mark, under, "each node starts Ray itself; delete it")
    mounts = {
        str(m.get("mountPath")): m for each in containers for m in each.get("volumeMounts") or ()
    }
    volumes = {
        str(volume.get("name")): volume
        for each in (first, *others)
        for volume in at(each, "spec").get("volumes") or ()
    }
    container = {
        **containers[0],
        "command": ["true"],
        "args": None,
        "env": _join_env(job, containers, where, kept),
        "volumeMounts": list(mounts.values()),
        "resources": {"limits": _join_needs(job, containers, where, kept)},
        # Ray's own probes and ports, which Cavvy does not need
        **dict.fromkeys(("lifecycle", "ports", "livenessProbe", "readinessProbe", "startupProbe")),
    }
    pods = [at(each, "spec") for each in (first, *others)]
    merged = {**(pods[-1]), **(pods[0])}
    labels = {key: value for pod in pods for key, value in at(pod, "nodeSelector").items()}
    return {
        **first,
        "spec": {
            **merged,
            "containers": [container],
            "volumes": list(volumes.values()),
            "nodeSelector": labels,
            "initContainers": None,
        },
    }


def _join_needs(
    job: JobObject, containers: Sequence[Values], where: str, kept: TranslationNotes
) -> Values:
    """Return the larger of what the containers need of each resource."""
    needs: list[dict[str, Any]] = [
        {**at(each, "resources", "limits"), **at(each, "resources", "requests")}
        for each in containers
    ]
    joined: dict[str, Any] = {}
    for need in needs:
        for key, value in need.items():
            joined[key] = max(joined.get(key, value), value, key=_measure)
    if any(need != needs[0] for need in needs):
        reason = "head and workers need different resources, and all nodes of a job are alike: "
        kept.note(job.mark, f"{where}.headGroupSpec", f"{reason}each gets the larger ones")
    return joined


def _join_env(
    job: JobObject, containers: Sequence[Values], where: str, kept: TranslationNotes
) -> Sequence[Values]:
    """Return the variables of all containers, which must agree."""
    env: dict[str, Any] = {}
    for each in containers:
        for entry in each.get("env") or ():
            name = str(entry.get("name"))
            if env.setdefault(name, entry) != entry:
                reason = f"head and workers have other values of {name}; give it one name for each"
                kept.refuse(job.mark, f"{where}.workerGroupSpecs.env.{name}", reason)
    return list(env.values())


def _sort_pod(job: JobObject, pod: Values, where: str, kept: TranslationNotes) -> None:
    """Refuse what a node does not run beside Ray, and name what waits for the head."""
    more: Sequence[Values] = (pod.get("containers") or ())[1:]
    for each in more:
        reason = "a node runs one container; write its commands into the image, or delete it"
        kept.refuse(job.mark, f"{where}.containers.{each.get('name')}", reason)
    for each in pod.get("initContainers") or ():
        key, text = f"{where}.initContainers.{each.get('name')}", json.dumps(each, default=str)
        if re.search(r"nslookup|health-check|wait", text):
            kept.note(job.mark, key, "each node waits for the head itself")
        else:
            kept.refuse(job.mark, key, "put its work into the image, or into `inputs`")


def _measure(value: object) -> float:
    from cavvy.capabilities.importers.kubernetes.deployment import read_quantity

    return read_quantity(value)


def _count(group: Values) -> int:
    count = group.get("replicas")
    return int(group.get("minReplicas", 1) if count is None else count)


def _write_params(group: Values) -> str:
    """Return the options of `ray start` that a group states, as words of a shell."""
    given = at(group, "rayStartParams")
    words = (f"--{key}={quote(str(value))} " for key, value in given.items() if key not in _OURS)
    return "".join(words)


def _write_groups(groups: Sequence[Values]) -> tuple[str, str]:
    """Return the lines of a worker that choose its options of `ray start` by its rank, if several
    groups have other ones, and the options."""
    words = [_write_params(each) for each in groups]
    if len({*words}) < 2:
        return "", words[0] if words else ""
    lines, last = "", 0
    for group, params in zip(groups, words, strict=True):
        last += _count(group)
        lines += f'  {"el" if lines else ""}if [ "$NODE_RANK" -le {last} ]; then set -- {params}\n'
    return f"{lines}  fi\n", '"$@" '


def _read_runtime(job: JobObject, spec: Values, kept: TranslationNotes) -> str:
    """Return the options of `ray job submit` for what the runtime environment says."""
    text = spec.get("runtimeEnvYAML")
    if not text:
        return ""
    try:
        found = load_plain(Path("runtimeEnvYAML"), str(text))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        kept.refuse(job.mark, "spec.runtimeEnvYAML", "expected a table as YAML")
        return ""
    return f"--runtime-env-json {quote(json.dumps(found))} "

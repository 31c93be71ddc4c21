"""Translates objects of Kubernetes whose pods work together to a task with several nodes: the jobs
of Kubeflow's training operator (PyTorchJob, XGBoostJob, TFJob, MPIJob and JAXJob), TrainJob and
JobSet.

What each operator sets in its pods is in https://www.kubeflow.org/docs/components/trainer and
https://jobset.sigs.k8s.io/docs/overview.
"""

import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from shlex import quote
from typing import Any

from cavvy.capabilities.importers.kubernetes.objects import (
    JobObject,
    PodKeys,
    Values,
    at,
    keep_container,
    keep_pod,
    keep_table,
)
from cavvy.domain.tasks import JobLimits, RetryPolicy, TaskSpec
from cavvy.domain.values import Struct, replace
from cavvy.spec.kept_keys import TranslationNotes

PodReader = Callable[[JobObject, Values, TranslationNotes], TaskSpec | None]
BACKOFF_LIMIT = 6  # Kubernetes' default for a Job
BACKOFF_S = 10  # the delay before the first retry, which doubles
GONE = "an ended job stays in the list until `cavvy rm` removes it"
_SUSPENDED = "a suspended job does not start; delete the key"
_OF_RUN_POLICY = PodKeys(
    read=("backoffLimit", "activeDeadlineSeconds"),
    noted={
        "cleanPodPolicy": GONE,
        "ttlSecondsAfterFinished": GONE,
        "schedulingPolicy": "all nodes of a job start together",
    },
    refused={"suspend": _SUSPENDED},
)
# torchrun reads PET_*
_PYTORCH = """\
export RANK="$NODE_RANK" WORLD_SIZE="$NNODES" PET_NNODES="$NNODES" PET_NODE_RANK="$NODE_RANK"
export PET_MASTER_ADDR="$MASTER_ADDR" PET_MASTER_PORT="$MASTER_PORT" PYTHONUNBUFFERED=1
export PET_NPROC_PER_NODE={processes}
"""
_JAX = """\
export COORDINATOR_ADDRESS="$MASTER_ADDR" COORDINATOR_PORT="$MASTER_PORT" PYTHONUNBUFFERED=1
export NUM_PROCESSES="$NNODES" PROCESS_ID="$NODE_RANK"
"""
_XGBOOST = """\
export RANK="$NODE_RANK" WORLD_SIZE="$NNODES" WORKER_PORT="$MASTER_PORT" PYTHONUNBUFFERED=1
export WORKER_ADDRS="${CAVVY_HOSTS#*,}"
[ "$NNODES" -gt 1 ] || WORKER_ADDRS=
"""
# Each node has a port of its own, since several may be on one machine.
_TENSORFLOW = """\
_rank=0 _chief= _workers=
for _host in $(echo "$CAVVY_HOSTS" | tr ',' ' '); do
  _place="\\"$_host:$((MASTER_PORT + 10 + _rank))\\""
  if [ -n "{chief}" ] && [ $_rank = 0 ]; then _chief="$_place"
  else _workers="${{_workers:+$_workers, }}$_place"; fi
  _rank=$((_rank + 1))
done
_type=worker _index="$NODE_RANK" _cluster="\\"worker\\": [$_workers]"
if [ -n "{chief}" ]; then
  _cluster="\\"{chief}\\": [$_chief]${{_workers:+, $_cluster}}"
  if [ "$NODE_RANK" = 0 ]; then _type={chief}; else _index=$((NODE_RANK - 1)); fi
fi
_task="{{\\"type\\": \\"$_type\\", \\"index\\": $_index}}"
TF_CONFIG="{{\\"cluster\\": {{$_cluster}}, \\"task\\": $_task}}"
export TF_CONFIG
"""
_JOBSET = """\
export JOB_COMPLETION_INDEX="$((NODE_RANK % {pods}))" JOB_INDEX="$((NODE_RANK / {pods}))"
export JOB_GLOBAL_INDEX="$JOB_INDEX"
"""


class _Operator(Struct, frozen=True, kw_only=True):
    """One kind of the training operator: the key of its roles, the roles whose pods are the nodes,
    in the order of their ranks, the `restartPolicy` of those that state none, and its other keys.
    """

    specs: str
    roles: tuple[str, ...]
    restart: str = "Never"
    read: tuple[str, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()
    noted: tuple[tuple[str, str], ...] = ()


_OPERATORS = {
    "PyTorchJob": _Operator(
        specs="pytorchReplicaSpecs",
        roles=("Master", "Worker"),
        restart="OnFailure",
        read=("nprocPerNode",),
        refused=(("elasticPolicy", "the number of nodes of a job is fixed; delete the key"),),
    ),
    "JAXJob": _Operator(specs="jaxReplicaSpecs", roles=("Worker",)),
    "XGBoostJob": _Operator(specs="xgbReplicaSpecs", roles=("Master", "Worker")),
    "TFJob": _Operator(
        specs="tfReplicaSpecs",
        roles=("Chief", "Master", "Worker"),
        noted=(
            ("successPolicy", "a job has succeeded when all of its nodes have"),
            ("enableDynamicWorker", "the number of nodes of a job is fixed"),
        ),
    ),
    "MPIJob": _Operator(
        specs="mpiReplicaSpecs",
        roles=("Launcher", "Worker"),
        read=("slotsPerWorker", "sshAuthMountPath", "mpiImplementation", "runLauncherAsWorker"),
        noted=(
            ("launcherCreationPolicy", "the launcher starts when all nodes are there"),
            ("cleanPodPolicy", GONE),
            ("ttlSecondsAfterFinished", GONE),
        ),
    ),
}
_OF_TRAIN_JOB = PodKeys(
    read=("trainer", "runtimeRef", "activeDeadlineSeconds", "failurePolicy"),
    noted={
        "podGroupPolicy": "all nodes of a job start together",
        **dict.fromkeys(("labels", "annotations"), "`tags` describe a job"),
        "managedBy": "Cavvy runs the job",
    },
    refused={
        "suspend": _SUSPENDED,
        "initializer": "write `inputs` in a Cavvy file, which copy models and data",
        "podTemplateOverrides": "what it adds is a part of the runtime of a cluster",
    },
)
_OF_TRAINER = PodKeys(
    read=("image", "command", "args", "env", "numNodes", "resourcesPerNode", "numProcPerNode"),
    noted={},
    refused={},
)
_OF_JOB_SET = PodKeys(
    read=("replicatedJobs", "failurePolicy"),
    noted={
        "ttlSecondsAfterFinished": GONE,
        "network": "MASTER_ADDR and CAVVY_HOSTS have the addresses of the pods",
        "coordinator": "the first node is the coordinator",
        "successPolicy": "a job has succeeded when all of its nodes have",
        "startupPolicy": "all nodes of a job start together",
    },
    refused={"suspend": _SUSPENDED, "managedBy": "the controller does not exist here"},
)
_OF_REPLICATED = PodKeys(
    read=("template", "selector", "parallelism", "completions", "completionMode", "backoffLimit"),
    noted={"ttlSecondsAfterFinished": GONE, "podReplacementPolicy": "nodes start together"},
    refused={"activeDeadlineSeconds": "a limit of a part; write `limits` in a Cavvy file"},
)
# keys of the pod of an MPIJob's launcher that are about its own node, and the rights of a worker
# that only its SSH server and RDMA devices need
_OF_LAUNCHER = (
    *("nodeSelector", "affinity", "tolerations", "hostname", "subdomain", "setHostnameAsFQDN"),
    *("hostNetwork", "dnsConfig", "imagePullSecrets"),
)
_OF_SERVER = ("IPC_LOCK", "SYS_CHROOT")
_NO_TORCH = re.compile("mpi|deepspeed|horovod|jax|mlx|xgboost|flux")
GANG_KINDS = (*_OPERATORS, "TrainJob", "JobSet")


def read_gang(job: JobObject, read_pod: PodReader, kept: TranslationNotes) -> TaskSpec | None:
    """Return the task of an object whose pods work together. `read_pod` reads a pod's template."""
    if job.kind == "TrainJob":
        return _read_train_job(job, read_pod, kept)
    if job.kind == "JobSet":
        return _read_job_set(job, read_pod, kept)
    return _read_operator_job(job, read_pod, kept)


def read_limits(spec: Values) -> JobLimits:
    """Return the limits that `activeDeadlineSeconds` states."""
    seconds = spec.get("activeDeadlineSeconds")
    return JobLimits(duration=None if seconds is None else timedelta(seconds=int(seconds)))


def _read_operator_job(
    job: JobObject, read_pod: PodReader, kept: TranslationNotes
) -> TaskSpec | None:
    operator, spec = _OPERATORS[job.kind], at(job.values, "spec")
    keys = PodKeys(
        read=(operator.specs, "runPolicy", *operator.read),
        noted=dict(operator.noted),
        refused=dict(operator.refused),
    )
    keep_table(job.mark, spec, keys, "spec", kept)
    policy = at(spec, "runPolicy")
    keep_table(job.mark, policy, _OF_RUN_POLICY, "spec.runPolicy", kept)
    replicas, where = at(spec, operator.specs), f"spec.{operator.specs}"
    roles = {name: at(replicas, name) for name in operator.roles if replicas.get(name)}
    for name in replicas:
        if name not in operator.roles:
            reason = "pods of this role do something else, and all nodes of a job are alike"
            kept.refuse(job.mark, f"{where}.{name}", reason)
    if not roles:
        kept.refuse(job.mark, where, f"expected {' or '.join(operator.roles)}")
        return None
    if job.kind == "MPIJob":
        task = _read_mpi(job, spec, roles, read_pod, kept)
    else:
        _compare(job, where, roles, kept)
        for name in ("Master", "Chief"):
            if int(roles.get(name, {}).get("replicas", 1)) != 1:
                reason = "there is one; the others are Workers"
                kept.refuse(job.mark, f"{where}.{name}.replicas", reason)
        task = read_pod(job, at(next(iter(roles.values())), "template"), kept)
        nodes = sum(int(role.get("replicas", 1)) for role in roles.values())
        task = task and replace(task, nodes=nodes, run=_begin(job.kind, spec, roles) + task.run)
    if task is None:
        return None
    retry = _read_restarts(job, next(iter(roles.values())), policy)
    return replace(task, limits=read_limits(policy), retry=retry)


def _begin(kind: str, spec: Values, roles: Values) -> str:
    """Return the lines that set what the operator sets in each pod."""
    if kind == "XGBoostJob":
        return _XGBOOST
    if kind == "JAXJob":
        return _JAX
    if kind == "TFJob":
        chief = next((name.lower() for name in ("Chief", "Master") if name in roles), "")
        return _TENSORFLOW.format(chief=chief)
    processes = str(spec.get("nprocPerNode") or "auto")
    return _PYTORCH.format(processes=_count_processes(processes))


def _compare(job: JobObject, where: str, roles: Values, kept: TranslationNotes) -> None:
    """Refuse roles whose pods differ."""
    (name, first), *others = roles.items()
    for other, role in others:
        if difference := _find_difference(first, role):
            reason = f"{name} and {other} differ in `{difference}`, and all nodes of a job are "
            kept.refuse(job.mark, where, f"{reason}alike")


def _read_mpi(
    job: JobObject, spec: Values, roles: Values, read_pod: PodReader, kept: TranslationNotes
) -> TaskSpec | None:
    """Return the task of an MPIJob: the commands of the launcher on the nodes of the workers."""
    launcher, worker = roles.get("Launcher", {}), roles.get("Worker", {})
    where = "spec.mpiReplicaSpecs"
    if not launcher or not worker:
        kept.refuse(job.mark, where, "expected Launcher and Worker")
        return None
    images = [_container(role).get("image") for role in (launcher, worker)]
    if images[0] != images[1]:
        kept.refuse(job.mark, where, "Launcher and Worker have different images")
    pod = _join_mpi_pods(job, where, launcher, worker, kept)
    task = read_pod(job, {**at(worker, "template"), "spec": pod}, kept)
    if task is None:
        return None
    if "/etc/mpi/" in task.run:
        reason = "the command names /etc/mpi/hostfile, which only the operator writes; delete it: "
        kept.refuse(job.mark, f"{where}.Launcher", f"{reason}mpirun knows the nodes")
    slots = int(spec.get("slotsPerWorker", 1))
    run = f"export NPROC_PER_NODE={slots}\nexec $CAVVY_MPI sh -c {quote(task.run)}"
    return replace(task, nodes=int(worker.get("replicas", 1)), run=run)


def _join_mpi_pods(
    job: JobObject, where: str, launcher: Values, worker: Values, kept: TranslationNotes
) -> Values:
    """Return the pod of a worker with the commands of the launcher, and the volumes of both."""
    pods = {name: at(role, "template", "spec") for name, role in _name_mpi(launcher, worker)}
    for name, pod in pods.items():
        if len(pod.get("containers") or ()) > 1:
            kept.refuse(job.mark, f"{where}.{name}.template.spec.containers", "expected one")
    if pods["Launcher"].get("initContainers"):
        reason = "the launcher has no node of its own; put them before its command"
        kept.refuse(job.mark, f"{where}.Launcher.template.spec.initContainers", reason)
    _keep_mpi_pods(job, where, launcher, worker, kept)
    volumes, mounts = dict[str, Values](), dict[str, Values]()
    for name, role in _name_mpi(launcher, worker):
        for found, key, listed in (
            (volumes, "name", pods[name].get("volumes")),
            (mounts, "mountPath", _container(role).get("volumeMounts")),
        ):
            for each in listed or ():
                if found.setdefault(str(each.get(key)), each) != each:
                    reason = f"Launcher and Worker differ in {each.get(key)}, and a node has one"
                    kept.refuse(job.mark, where, reason)
    container = {
        **_container(launcher),
        "resources": _container(worker).get("resources") or {},
        "volumeMounts": [*mounts.values()],
    }
    return {**pods["Worker"], "containers": [container], "volumes": [*volumes.values()]}


def _keep_mpi_pods(
    job: JobObject, where: str, launcher: Values, worker: Values, kept: TranslationNotes
) -> None:
    """Note or refuse what the joined pod has neither of the launcher's pod, of which it has the
    container, nor of the worker's container.
    """
    pod, under = at(launcher, "template", "spec"), f"{where}.Launcher.template.spec"
    elsewhere = "the launcher's command runs on the first worker's node"
    for key in _OF_LAUNCHER:
        if pod.get(key):
            kept.note(job.mark, f"{under}.{key}", elsewhere)
    read = {
        key: value for key, value in pod.items() if key not in (*_OF_LAUNCHER, "initContainers")
    }
    keep_pod(job.mark, read, under, kept)
    first, other = _container(launcher), _container(worker)
    if first.get("resources") and first["resources"] != other.get("resources"):
        kept.note(job.mark, f"{under}.containers.resources", f"{elsewhere}, and has its resources")
    _keep_worker(job, other, f"{where}.Worker.template.spec.containers", kept)
    seconds = "terminationGracePeriodSeconds"
    if seconds in pod and pod[seconds] != at(worker, "template", "spec").get(seconds):
        kept.note(job.mark, f"{under}.{seconds}", "that of the workers counts")
    for key in ("command", "args"):
        if other.get(key):
            reason = "the nodes need no SSH server: `mpirun` of the launcher reaches them"
            kept.note(job.mark, f"{where}.Worker.{key}", reason)
    if other.get("workingDir") not in (None, first.get("workingDir")):
        reason = "the processes start in the launcher's folder"
        kept.note(job.mark, f"{where}.Worker.workingDir", reason)
    for key in ("env", "envFrom"):
        for each in other.get(key) or ():
            if each not in (first.get(key) or ()):
                name = f".{each['name']}" if "name" in each else ""
                reason = "the processes get the variables of the launcher instead"
                kept.note(job.mark, f"{where}.Worker.{key}{name}", reason)


def _keep_worker(job: JobObject, container: Values, under: str, kept: TranslationNotes) -> None:
    """Note or refuse what the joined pod has not of the worker's container. What only its SSH
    server needs is no loss, and RDMA devices come with the right to lock memory.
    """
    left = {
        key: value
        for key, value in container.items()
        if key not in ("envFrom", "resources", "lifecycle")
    }
    if container.get("lifecycle"):
        reason = "the command of the worker, and so what is done before and after it, does not run"
        kept.note(job.mark, f"{under}.lifecycle", reason)
    security = at(container, "securityContext")
    rights = at(security, "capabilities")
    added = rights.get("add") or ()
    own = [each for each in added if str(each).upper().removeprefix("CAP_") not in _OF_SERVER]
    if len(own) < len(added):
        noted = ", ".join(str(each) for each in added if each not in own)
        reason = f"{noted}: no SSH server runs, and nodes with RDMA devices may lock memory"
        kept.note(job.mark, f"{under}.securityContext.capabilities.add", reason)
        left["securityContext"] = {**security, "capabilities": {**rights, "add": own}}
    keep_container(job.mark, left, under, kept)


def _name_mpi(launcher: Values, worker: Values) -> tuple[tuple[str, Values], ...]:
    return ("Worker", worker), ("Launcher", launcher)


def _container(role: Values) -> Values:
    containers: Sequence[Values] = at(role, "template", "spec").get("containers") or ({},)
    return containers[0]


def _read_train_job(job: JobObject, read_pod: PodReader, kept: TranslationNotes) -> TaskSpec | None:
    spec = at(job.values, "spec")
    keep_table(job.mark, spec, _OF_TRAIN_JOB, "spec", kept)
    trainer = at(spec, "trainer")
    keep_table(job.mark, trainer, _OF_TRAINER, "spec.trainer", kept)
    runtime = str(at(spec, "runtimeRef").get("name") or "")
    found = _read_runtime(job, runtime, kept)
    trainer, pod = _join_runtime(trainer, found)
    missing = [key for key in ("image", "command") if not trainer.get(key)]
    if trainer.get("args"):
        missing = [key for key in missing if key != "command"]
    if missing:
        reason = f"the runtime {runtime or 'of the cluster'} has the {' and the '.join(missing)}; "
        reason += f"write {' and '.join(f'`{key}`' for key in missing)} here"
        kept.refuse(job.mark, "spec.trainer", reason)
        return None
    policy = at(found, "mlPolicy")
    if _NO_TORCH.search(runtime) or _NO_TORCH.search(" ".join(policy)):
        reason = f"the runtime {runtime} starts processes in another way than torchrun; write "
        kept.refuse(job.mark, "spec.runtimeRef", f"{reason}a Cavvy file")
    elif not runtime.startswith("torch") and "torch" not in policy:
        reason = "the pods get the variables of torchrun, as with the runtime torch-distributed"
        kept.note(job.mark, "spec.runtimeRef", reason)
    container: dict[str, Any] = {
        "name": "node",
        **{key: trainer[key] for key in ("image", "command", "args", "env") if key in trainer},
        "resources": trainer.get("resourcesPerNode") or {},
    }
    container = {**at({"x": pod.get("container")}, "x"), **container}
    task = read_pod(job, {"spec": {**at(pod, "spec"), "containers": [container]}}, kept)
    if task is None:
        return None
    processes = _count_processes(str(trainer.get("numProcPerNode") or "auto"))
    return replace(
        task,
        nodes=int(trainer.get("numNodes", 1)),
        run=_PYTORCH.format(processes=processes) + task.run,
        limits=read_limits(spec),
        retry=_read_max_restarts(spec),
    )


def _read_runtime(job: JobObject, name: str, kept: TranslationNotes) -> Values:
    """Return the `spec` of the runtime that a TrainJob names, if the file has it."""
    found = next((each for each in job.runtimes if at(each, "metadata").get("name") == name), {})
    parts: Sequence[Values] = at(found, "spec", "template", "spec").get("replicatedJobs") or ()
    if len(parts) > 1:
        reason = "the runtime has several jobs, such as one that loads data; write `inputs` in a "
        kept.refuse(job.mark, "spec.runtimeRef", f"{reason}Cavvy file")
    pod = at(parts[0], "template", "spec", "template", "spec") if parts else {}
    if len(pod.get("containers") or ()) > 1:
        reason = "the runtime's pod has several containers, and a node runs one"
        kept.refuse(job.mark, "spec.runtimeRef", f"{reason}; delete the others")
    return at(found, "spec")


def _join_runtime(trainer: Values, runtime: Values) -> tuple[Values, Values]:
    """Return what a TrainJob and its runtime say of the trainer, where the job comes first, and
    the pod of the runtime: its `spec`, and its `container`.
    """
    parts: Sequence[Values] = at(runtime, "template", "spec").get("replicatedJobs") or ({},)
    pod = at(parts[0], "template", "spec", "template", "spec")
    containers: Sequence[Values] = pod.get("containers") or ({},)
    container, policy = dict(containers[0]), at(runtime, "mlPolicy")
    processes = at(policy, "torch").get("numProcPerNode")
    own: Sequence[Values] = trainer.get("env") or ()
    names = {each.get("name") for each in own}
    env = [each for each in container.get("env") or () if each.get("name") not in names]
    stated: Values = {
        key: container[key] for key in ("image", "command", "args") if key in container
    }
    stated |= {"numNodes": policy["numNodes"]} if "numNodes" in policy else {}
    stated |= {"numProcPerNode": processes} if processes else {}
    stated |= {"resourcesPerNode": container["resources"]} if "resources" in container else {}
    return {**stated, **trainer, "env": [*env, *own]}, {"spec": pod, "container": container}


def _read_job_set(job: JobObject, read_pod: PodReader, kept: TranslationNotes) -> TaskSpec | None:
    spec = at(job.values, "spec")
    keep_table(job.mark, spec, _OF_JOB_SET, "spec", kept)
    parts: Sequence[Values] = spec.get("replicatedJobs") or ()
    if len(parts) != 1:
        reason = "expected one: all nodes of a job are alike, and `group` in Cavvy files joins "
        kept.refuse(job.mark, "spec.replicatedJobs", f"{reason}several")
        return None
    inner = at(parts[0], "template", "spec")
    keep_table(job.mark, inner, _OF_REPLICATED, "spec.replicatedJobs.template.spec", kept)
    pods = int(inner.get("parallelism", 1))
    if int(inner.get("completions") or pods) != pods:
        reason = "pods that start one after another are no gang; write `completions` as "
        kept.refuse(job.mark, "spec.replicatedJobs.completions", f"{reason}`parallelism`")
    task = read_pod(job, at(inner, "template"), kept)
    if task is None:
        return None
    name = str(at(job.values, "metadata").get("name"))
    first = f"{name}-{parts[0].get('name')}-0-0"
    if first in task.run or any(first in value for value in task.env.values()):
        reason = f"the name {first} does not exist here; write $MASTER_ADDR in the command"
        kept.refuse(job.mark, "spec.replicatedJobs", reason)
    retry = _read_max_restarts(spec, int(inner.get("backoffLimit", BACKOFF_LIMIT)))
    nodes = int(parts[0].get("replicas", 1)) * max(1, pods)
    return replace(task, nodes=nodes, run=_JOBSET.format(pods=max(1, pods)) + task.run, retry=retry)


def _read_max_restarts(spec: Values, limit: int = 0) -> RetryPolicy:
    """Return the retries of a set of jobs. Each job starts its pods again `limit` times, and then
    the set starts all jobs again, `maxRestarts` times.
    """
    restarts = int(at(spec, "failurePolicy").get("maxRestarts", 0))
    return _make_retry((restarts + 1) * (limit + 1) - 1)


def _make_retry(count: int) -> RetryPolicy:
    return RetryPolicy(exit=count, delay=timedelta(seconds=BACKOFF_S if count else 0))


def _count_processes(text: str) -> str:
    """Return the processes of a node as a word of a shell; `auto` and `gpu` mean one a GPU."""
    if text in ("auto", "gpu"):
        return '"$NPROC_PER_NODE"'
    return text if text.isdecimal() else "1"  # cpu: one process


def _read_restarts(job: JobObject, role: Values, policy: Values) -> RetryPolicy:
    """Return the retries of a replica that fails."""
    if str(job.values.get("apiVersion")).startswith("kubeflow.org/v2"):
        # the launcher of an MPIJob is a Job of Kubernetes, which counts all failures of its pods
        return _make_retry(int(policy.get("backoffLimit", BACKOFF_LIMIT)))
    restart = role.get("restartPolicy", _OPERATORS[job.kind].restart)
    if restart == "Never":
        return RetryPolicy(exit=0)
    limit = policy.get("backoffLimit")
    delay = timedelta(seconds=BACKOFF_S)
    # of ExitCode, codes from 128 on, as of a signal, are those to retry
    codes = tuple(range(128, 256)) if restart == "ExitCode" else ()
    return RetryPolicy(exit=None if limit is None else int(limit), exit_codes=codes, delay=delay)


def _find_difference(first: Values, other: Values) -> str:
    """Return the key in which the pods of two roles differ, or ""."""
    left, right = (at(role, "template", "spec") for role in (first, other))
    pairs: list[tuple[Values, Values, str]] = [(left, right, "spec")]
    one: Sequence[Values] = left.get("containers") or ()
    two: Sequence[Values] = right.get("containers") or ()
    pairs += [(a, b, "containers") for a, b in zip(one, two, strict=False)]
    for a, b, where in pairs:
        for key in sorted({*a, *b} - {"containers", "name"}):
            if a.get(key) != b.get(key):
                return f"{where}.{key}"
    return ""

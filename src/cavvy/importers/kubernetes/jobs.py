"""Translates a Job, CronJob, Pod or PyTorchJob of Kubernetes to a task.

The pod is read as that of a Deployment. What says how often and how long it runs is read here, by
https://kubernetes.io/docs/concepts/workloads/controllers/job and
https://www.kubeflow.org/docs/components/trainer/legacy-v1/user-guides/pytorch.
"""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from cavvy.domain.arrays import MOST_MEMBERS
from cavvy.domain.tasks import IndexRange, JobLimits, JobSchedule, RetryPolicy, TaskSpec
from cavvy.domain.values import replace
from cavvy.importers.kept_keys import TranslationNotes
from cavvy.importers.kubernetes.deployment import (
    read_command,
    read_env,
    read_image,
    read_resources,
    read_volumes,
)
from cavvy.importers.kubernetes.objects import (
    JobObject,
    PodKeys,
    ServiceObjects,
    Values,
    at,
    keep_table,
    keep_unread,
)
from cavvy.spec.fields.kinds import WrongValue
from cavvy.spec.fields.times import check_cron
from cavvy.spec.problems import slug

_BACKOFF_LIMIT = 6  # Kubernetes' default for a Job
_BACKOFF_S = 10  # the delay before the first retry, which doubles
_QUEUE = "kueue.x-k8s.io/queue-name"
_GONE = "an ended job stays in the list until `cavvy rm` removes it"
_OF_JOB = PodKeys(
    read=(
        *("template", "selector", "manualSelector", "parallelism", "completions"),
        *("completionMode", "backoffLimit", "activeDeadlineSeconds"),
    ),
    noted={"ttlSecondsAfterFinished": _GONE, "podReplacementPolicy": "a node ends before the next"},
    refused={
        "suspend": "a suspended Job does not start; delete the key",
        "podFailurePolicy": "write `retry` in a Cavvy file: it can retry certain exit codes only",
        "successPolicy": "an array has succeeded when all of its jobs have",
        "backoffLimitPerIndex": "write `retry` in a Cavvy file, which counts for each job",
        "maxFailedIndexes": "an array goes on when jobs of it fail",
        "managedBy": "the controller that it names does not exist here",
    },
)
_OF_CRON_JOB = PodKeys(
    read=("schedule", "timeZone", "jobTemplate", "concurrencyPolicy"),
    noted={
        "successfulJobsHistoryLimit": _GONE,
        "failedJobsHistoryLimit": _GONE,
        "startingDeadlineSeconds": "a job that could not start in time starts when it can",
    },
    refused={"suspend": "a suspended CronJob does not start; delete the key"},
)
_OF_PYTORCH_JOB = PodKeys(
    read=("pytorchReplicaSpecs", "runPolicy", "nprocPerNode"),
    noted={},
    refused={"elasticPolicy": "the number of nodes of a job is fixed; delete the key"},
)
_OF_RUN_POLICY = PodKeys(
    read=("backoffLimit", "activeDeadlineSeconds"),
    noted={
        "cleanPodPolicy": _GONE,
        "ttlSecondsAfterFinished": _GONE,
        "schedulingPolicy": "all nodes of a job start together",
    },
    refused={"suspend": "a suspended job does not start; delete the key"},
)
# What the training operator sets in each pod; torchrun reads PET_*:
# https://github.com/kubeflow/training-operator (v1)
_PYTORCH = """\
export RANK="$NODE_RANK" WORLD_SIZE="$NNODES" PET_NNODES="$NNODES" PET_NODE_RANK="$NODE_RANK"
export PET_MASTER_ADDR="$MASTER_ADDR" PET_MASTER_PORT="$MASTER_PORT" PYTHONUNBUFFERED=1
export PET_NPROC_PER_NODE={processes}
"""


def read_job(job: JobObject, kept_keys: TranslationNotes) -> TaskSpec | None:
    """Return the task of the object, or None if what it lacks is refused."""
    if job.kind == "PyTorchJob":
        return _read_pytorch_job(job, kept_keys)
    spec = at(job.values, "spec")
    schedule = None
    if job.kind == "CronJob":
        keep_table(job.mark, spec, _OF_CRON_JOB, "spec", kept_keys)
        schedule = _read_schedule(job, spec, kept_keys)
        spec = at(spec, "jobTemplate", "spec")
    if job.kind == "Pod":
        task = _read_pod(job, {"spec": spec}, kept_keys)
        restart = spec.get("restartPolicy", "Always")
        if restart == "Always":
            reason = "the work runs once; Kubernetes would start it again when it has ended"
            kept_keys.note(job.mark, "spec.restartPolicy", reason)
        retry = RetryPolicy(exit=0 if restart in ("Always", "Never") else None)
        return task and replace(task, retry=retry)
    keep_table(job.mark, spec, _OF_JOB, "spec", kept_keys)
    task = _read_pod(job, at(spec, "template"), kept_keys)
    if task is None:
        return None
    array, parallel = _read_completions(job, spec, kept_keys)
    limit = int(spec.get("backoffLimit", _BACKOFF_LIMIT))
    if limit < 0:
        kept_keys.refuse(job.mark, "spec.backoffLimit", "expected 0 or more")
    run = task.run
    if array and spec.get("completionMode") == "Indexed":
        run = f'export JOB_COMPLETION_INDEX="$CAVVY_ARRAY_INDEX"\n{run}'
    return replace(
        task,
        run=run,
        array=array,
        parallel=parallel,
        schedule=schedule,
        limits=_read_limits(spec),
        retry=RetryPolicy(exit=limit, delay=timedelta(seconds=_BACKOFF_S if limit else 0)),
    )


def _read_pod(job: JobObject, template: Values, kept_keys: TranslationNotes) -> TaskSpec | None:
    """Return the task of a pod's template."""
    template = _add_config_maps(job, template)
    values = {"metadata": at(job.values, "metadata"), "spec": {"template": template}}
    objects = ServiceObjects(mark=job.mark, deployment=values, claims=job.claims)
    keep_unread(objects, kept_keys)
    pod = objects.pod
    if len(pod.get("containers") or ()) != 1:
        kept_keys.refuse(job.mark, "spec.containers", "expected one container")
        return None
    if pod.get("subdomain"):
        reason = "pods that find each other by name are the nodes of one job: write `nodes`"
        kept_keys.refuse(job.mark, "spec.subdomain", reason)
    for place in (at(job.values, "metadata"), at(template, "metadata")):
        if queue := at(place, "labels").get(_QUEUE):
            kept_keys.note(job.mark, _QUEUE, f"--project, or --pool, queues the job, not {queue}")
    env, secrets = read_env(objects, kept_keys, job.config_maps)
    grace_s = pod.get("terminationGracePeriodSeconds", 30)  # Kubernetes' default
    metadata = at(job.values, "metadata")
    return TaskSpec(
        name=slug(str(metadata.get("name") or metadata.get("generateName") or "").strip("-")),
        run=read_command(objects),
        image=read_image(objects.container),
        env=env,
        secrets=secrets,
        resources=read_resources(objects, kept_keys),
        volumes=read_volumes(objects, kept_keys),
        grace=timedelta(seconds=int(grace_s)),
    )


def _add_config_maps(job: JobObject, template: Values) -> Values:
    """Return the template with the variables of `envFrom` that ConfigMaps of the file have."""
    pod = dict(at(template, "spec"))
    containers = []
    for container in pod.get("containers") or ():
        left, added = [], []
        for source in container.get("envFrom") or ():
            values = job.config_maps.get(str(at(source, "configMapRef").get("name")))
            if values is None:
                left.append(source)
                continue
            prefix = source.get("prefix", "")
            added += [
                {"name": f"{prefix}{name}", "value": value.replace("$", "$$")}
                for name, value in values.items()
            ]
        env = [*added, *(container.get("env") or ())]
        containers.append({**container, "env": env, "envFrom": left})
    return {**template, "spec": {**pod, "containers": containers}}


def _read_completions(
    job: JobObject, spec: Values, kept_keys: TranslationNotes
) -> tuple[tuple[IndexRange, ...], int | None]:
    """Return the indices of the pods that must succeed, and how many run at once."""
    completions, parallel = spec.get("completions"), int(spec.get("parallelism", 1))
    if completions is None:
        if parallel > 1:
            reason = "a queue of work without `completions` has no equivalent; write `completions`"
            kept_keys.refuse(job.mark, "spec.parallelism", reason)
        return (), None
    if parallel == 0:
        kept_keys.refuse(job.mark, "spec.parallelism", "0 starts nothing; delete the key")
    if int(completions) > MOST_MEMBERS:
        reason = f"an array has at most {MOST_MEMBERS:,} jobs"
        kept_keys.refuse(job.mark, "spec.completions", reason)
        return (), None
    if int(completions) <= 1:
        return (), None
    return (IndexRange(0, int(completions) - 1),), parallel


def _read_limits(spec: Values) -> JobLimits:
    seconds = spec.get("activeDeadlineSeconds")
    return JobLimits(duration=None if seconds is None else timedelta(seconds=int(seconds)))


def _read_schedule(job: JobObject, spec: Values, kept_keys: TranslationNotes) -> JobSchedule:
    if spec.get("concurrencyPolicy", "Allow") == "Replace":
        reason = "a job that runs is not replaced; write Allow or Forbid"
        kept_keys.refuse(job.mark, "spec.concurrencyPolicy", reason)
    cron = str(spec["schedule"])
    try:
        check_cron(cron)
    except WrongValue as error:
        kept_keys.refuse(job.mark, "spec.schedule", str(error))
    return JobSchedule(cron=cron, time_zone=str(spec.get("timeZone") or "UTC"))


def _read_pytorch_job(job: JobObject, kept_keys: TranslationNotes) -> TaskSpec | None:
    spec = at(job.values, "spec")
    keep_table(job.mark, spec, _OF_PYTORCH_JOB, "spec", kept_keys)
    policy = at(spec, "runPolicy")
    keep_table(job.mark, policy, _OF_RUN_POLICY, "spec.runPolicy", kept_keys)
    replicas = at(spec, "pytorchReplicaSpecs")
    roles = {name: at(replicas, name) for name in ("Master", "Worker") if replicas.get(name)}
    if not roles:
        kept_keys.refuse(job.mark, "spec.pytorchReplicaSpecs", "expected Master or Worker")
        return None
    first, *others = roles.values()
    for other in others:
        if difference := _find_difference(first, other):
            reason = f"Master and Worker differ in `{difference}`, and all nodes of a job are alike"
            kept_keys.refuse(job.mark, "spec.pytorchReplicaSpecs", reason)
    task = _read_pod(job, at(first, "template"), kept_keys)
    if task is None:
        return None
    nodes = sum(int(role.get("replicas", 1)) for role in roles.values())
    processes = str(spec.get("nprocPerNode") or "auto")
    return replace(
        task,
        nodes=nodes,
        run=_PYTORCH.format(processes=_count_processes(processes)) + task.run,
        limits=_read_limits(policy),
        retry=_read_restarts(first, policy),
    )


def _count_processes(text: str) -> str:
    """Return the processes of a node as a word of a shell; `auto` and `gpu` mean one a GPU."""
    if text in ("auto", "gpu"):
        return '"$NPROC_PER_NODE"'
    return text if text.isdecimal() else "1"  # cpu: one process


def _read_restarts(role: Values, policy: Values) -> RetryPolicy:
    """Return the retries of a replica that fails. OnFailure is the operator's default."""
    restart = role.get("restartPolicy", "OnFailure")
    if restart == "Never":
        return RetryPolicy(exit=0)
    limit = policy.get("backoffLimit")
    delay = timedelta(seconds=_BACKOFF_S)
    # of ExitCode, codes from 128 on, as of a signal, are those to retry
    codes = tuple(range(128, 256)) if restart == "ExitCode" else ()
    return RetryPolicy(exit=None if limit is None else int(limit), exit_codes=codes, delay=delay)


def _find_difference(first: Values, other: Values) -> str:
    """Return the key in which the pods of two roles differ, or ""."""
    left, right = (at(role, "template", "spec") for role in (first, other))
    pairs: list[tuple[Mapping[str, Any], Mapping[str, Any], str]] = [(left, right, "spec")]
    one: Sequence[Values] = left.get("containers") or ()
    two: Sequence[Values] = right.get("containers") or ()
    pairs += [(a, b, "containers") for a, b in zip(one, two, strict=False)]
    for a, b, where in pairs:
        for key in sorted({*a, *b} - {"containers", "name"}):
            if a.get(key) != b.get(key):
                return f"{where}.{key}"
    return ""

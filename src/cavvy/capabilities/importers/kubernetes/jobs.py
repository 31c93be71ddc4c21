"""Translates a Job, CronJob or Pod of Kubernetes to a task; `gangs` does so with several nodes.

The pod is read as that of a Deployment. What says how often and how long it runs is read here, by
https://kubernetes.io/docs/concepts/workloads/controllers/job.
"""

import posixpath
import re
from collections.abc import Iterator
from datetime import timedelta
from hashlib import sha256
from shlex import quote

from cavvy.capabilities.importers.common_fields import is_variable_name
from cavvy.capabilities.importers.kubernetes.deployment import (
    ON_NODE,
    read_command,
    read_env,
    read_image,
    read_own_count,
    read_resources,
    read_volumes,
)
from cavvy.capabilities.importers.kubernetes.gangs import (
    BACKOFF_LIMIT,
    BACKOFF_S,
    GANG_KINDS,
    GONE,
    read_gang,
    read_limits,
)
from cavvy.capabilities.importers.kubernetes.objects import (
    JobObject,
    PodKeys,
    ServiceObjects,
    Values,
    at,
    keep_container,
    keep_table,
    keep_unread,
)
from cavvy.capabilities.importers.kubernetes.ray import RAY_KINDS, read_ray
from cavvy.domain.arrays import MOST_MEMBERS
from cavvy.domain.tasks import IndexRange, JobSchedule, RetryPolicy, TaskSpec
from cavvy.domain.values import replace
from cavvy.spec.fields.kinds import WrongValue
from cavvy.spec.fields.times import check_cron
from cavvy.spec.kept_keys import TranslationNotes
from cavvy.spec.problems import slug

_QUEUE = "kueue.x-k8s.io/queue-name"
_LEAST = "kueue.x-k8s.io/job-min-parallelism"
# the annotations and labels with an index of a pod, and the variables that have it here
_INDICES = {
    "batch.kubernetes.io/job-completion-index": "JOB_COMPLETION_INDEX",
    "jobset.sigs.k8s.io/job-index": "JOB_INDEX",
    "jobset.sigs.k8s.io/job-global-index": "JOB_GLOBAL_INDEX",
}
_OF_INDEX = re.compile(
    rf"metadata\.(?:annotations|labels)\['({'|'.join(map(re.escape, _INDICES))})'\]"
)
# the fields of a pod that have a meaning here, and the words of a shell for their values
_ADDRESS = '"$(echo "$CAVVY_HOSTS" | cut -d , -f $((NODE_RANK + 1)))"'
_FIELDS = {
    **dict.fromkeys(("status.podIP", "status.hostIP"), _ADDRESS),
    "metadata.name": '"$CAVVY_JOB-$NODE_RANK"',
    "spec.nodeName": '"$(uname -n)"',
}
_OF_JOB = PodKeys(
    read=(
        *("template", "selector", "manualSelector", "parallelism", "completions"),
        *("completionMode", "backoffLimit", "activeDeadlineSeconds"),
    ),
    noted={"ttlSecondsAfterFinished": GONE, "podReplacementPolicy": "a node ends before the next"},
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
        "successfulJobsHistoryLimit": GONE,
        "failedJobsHistoryLimit": GONE,
        "startingDeadlineSeconds": "a job that could not start in time starts when it can",
    },
    refused={"suspend": "a suspended CronJob does not start; delete the key"},
)


def read_job(job: JobObject, kept_keys: TranslationNotes) -> TaskSpec | None:
    """Return the task of the object, or None if what it lacks is refused."""
    job = _start_queued(job, kept_keys)
    if job.kind in GANG_KINDS:
        return read_gang(job, _read_pod, kept_keys)
    if job.kind in RAY_KINDS:
        return read_ray(job, _read_pod, kept_keys)
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
    if array and schedule:
        reason = "a schedule starts one job each time, and no array; write 1"
        kept_keys.refuse(job.mark, "spec.jobTemplate.spec.completions", reason)
        array, parallel = (), None
    limit = int(spec.get("backoffLimit", BACKOFF_LIMIT))
    if limit < 0:
        kept_keys.refuse(job.mark, "spec.backoffLimit", "expected 0 or more")
    run = task.run
    if spec.get("completionMode") == "Indexed":
        index = '"$CAVVY_ARRAY_INDEX"' if array else "0"
        run = f"export JOB_COMPLETION_INDEX={index}\n{run}"
    return replace(
        task,
        run=run,
        array=array,
        parallel=parallel,
        schedule=schedule,
        limits=read_limits(spec),
        retry=RetryPolicy(exit=limit, delay=timedelta(seconds=BACKOFF_S if limit else 0)),
    )


def _start_queued(job: JobObject, kept_keys: TranslationNotes) -> JobObject:
    """Return the object without `suspend` if Kueue would start it, as the queue of a project does
    here.
    """
    metadata, spec = at(job.values, "metadata"), at(job.values, "spec")
    if _LEAST in at(metadata, "annotations"):
        reason = "the jobs of an array start as nodes are free, also fewer than `parallelism`"
        kept_keys.note(job.mark, _LEAST, reason)
    if _QUEUE not in at(metadata, "labels"):
        return job
    policy = at(spec, "runPolicy")
    left = {key: value for key, value in spec.items() if key != "suspend"}
    if "suspend" in policy:
        own = {key: value for key, value in policy.items() if key != "suspend"}
        left["runPolicy"] = own
    return replace(job, values={**job.values, "spec": left})


def _read_pod(job: JobObject, template: Values, kept_keys: TranslationNotes) -> TaskSpec | None:
    """Return the task of a pod's template."""
    template, fields = _take_fields(job, _add_config_maps(job, template, kept_keys))
    template, files = take_config_files(job, template, kept_keys)
    values = {"metadata": at(job.values, "metadata"), "spec": {"template": template}}
    objects = ServiceObjects(mark=job.mark, deployment=values, claims=job.claims)
    before = files + _take_init(job, objects, kept_keys)
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
        run=fields + before + read_own_count(objects) + read_command(objects),
        image=read_image(objects.container),
        env=env,
        secrets=secrets,
        resources=read_resources(objects, kept_keys),
        volumes=read_volumes(objects, kept_keys),
        grace=timedelta(seconds=int(grace_s)),
    )


def _take_fields(job: JobObject, template: Values) -> tuple[Values, str]:
    """Return the template with its variables that take a field of their pod, such as its address or
    its index, marked as known on the node, and the commands that set them there.
    """
    spec = at(job.values, "spec")
    modes = (each.get("completionMode") for each in (spec, at(spec, "jobTemplate", "spec")))
    is_indexed = job.kind == "JobSet" or "Indexed" in modes
    pod, lines, containers = at(template, "spec"), "", []
    for container in pod.get("containers") or ():
        env = []
        for each in container.get("env") or ():
            path = str(at(each, "valueFrom", "fieldRef").get("fieldPath") or "")
            value = _FIELDS.get(path, "")
            if is_indexed and (found := _OF_INDEX.fullmatch(path)):
                value = f'"${_INDICES[found[1]]}"'
            if value and is_variable_name(name := str(each.get("name"))):
                lines += f"export {name}={value}\n"
                each = {"name": name, "valueFrom": ON_NODE}
            env.append(each)
        containers.append({**container, "env": env})
    return {**template, "spec": {**pod, "containers": containers}}, lines


def _take_init(job: JobObject, objects: ServiceObjects, kept_keys: TranslationNotes) -> str:
    """Take the init containers out of the pod. Return their commands, which run before those of the
    container, or beside it if they restart always.
    """
    image = objects.container.get("image")
    lines = ""
    for each in objects.pod.pop("initContainers", None) or ():
        where = f"initContainers.{each.get('name')}"
        own = {key: value for key, value in each.items() if key != "restartPolicy"}
        keep_container(job.mark, own, where, kept_keys)
        if each.get("image") != image:
            reason = "its image is not that of the container, and a node runs one image; put its "
            kept_keys.refuse(job.mark, where, f"{reason}work into the image, or into `inputs`")
            continue
        mounts = [(m.get("name"), m.get("mountPath")) for m in each.get("volumeMounts") or ()]
        if missing := [name for name, path in mounts if (name, path) not in _list_mounts(objects)]:
            reason = f"the container has the volume {missing[0]} at another path, or not at all"
            kept_keys.refuse(job.mark, f"{where}.volumeMounts", reason)
        pod = {**objects.pod, "containers": [each]}
        values = {"spec": {"template": {"spec": pod}}}
        alone = ServiceObjects(mark=job.mark, deployment=values, claims=job.claims)
        env, secrets = read_env(alone, kept_keys, job.config_maps)
        if secrets:
            reason = "secrets of init containers are not passed on; name them in the container"
            kept_keys.refuse(job.mark, f"{where}.env", reason)
        exports = "".join(f"export {name}={quote(value)}\n" for name, value in env.items())
        end = "&" if each.get("restartPolicy") == "Always" else "|| exit"
        lines += f"(\n{exports}{read_command(alone)}\n) {end}\n"
    return lines


def _list_mounts(objects: ServiceObjects) -> list[tuple[object, object]]:
    mounts = objects.container.get("volumeMounts") or ()
    return [(each.get("name"), each.get("mountPath")) for each in mounts]


def take_config_files(
    job: JobObject, template: Values, kept_keys: TranslationNotes
) -> tuple[Values, str]:
    """Take the volumes of ConfigMaps of the file out of a template. Return it with the commands
    that write their files, which the containers find where they mount them.
    """
    pod = dict(at(template, "spec"))
    maps = {each.get("name"): at(each, "configMap") for each in pod.get("volumes") or ()}
    named = {name: source for name, source in maps.items() if source}
    for name, source in named.items():
        if str(source.get("name")) not in job.config_maps and not source.get("optional"):
            reason = f"the file has no ConfigMap {source.get('name')}; put it into the same file"
            kept_keys.refuse(job.mark, f"volumes.{name}", reason)
    containers, lines = [], dict[str, str]()
    for container in pod.get("containers") or ():
        left = []
        for mount in container.get("volumeMounts") or ():
            source = named.get(mount.get("name"), {})
            if not source:
                left.append(mount)
                continue
            for path, text in _list_config_files(job, source, mount):
                lines.setdefault(path, text)
        containers.append({**container, "volumeMounts": left})
    volumes = [each for each in pod.get("volumes") or () if each.get("name") not in named]
    pod |= {"containers": containers, "volumes": volumes}
    return {**template, "spec": pod}, "".join(_write_file(*each) for each in lines.items())


def _list_config_files(job: JobObject, source: Values, mount: Values) -> Iterator[tuple[str, str]]:
    """Yield the path and the text of each file that a mounted ConfigMap has in a container."""
    data = job.config_maps.get(str(source.get("name")), {})
    chosen = {str(each["key"]): str(each["path"]) for each in source.get("items") or ()}
    place, part = str(mount["mountPath"]), mount.get("subPath")
    for key, text in data.items():
        name = chosen.get(key, key)
        if chosen and key not in chosen:
            continue
        if part is None:
            yield f"{place.rstrip('/')}/{name}", text
        elif str(part) == name:
            yield place, text


def _write_file(path: str, text: str) -> str:
    folder = posixpath.dirname(path)
    end = f"_CAVVY_END_OF_FILE_{sha256(text.encode()).hexdigest()[:16]}"
    return (
        f"mkdir -p {quote(folder)} && cat > {quote(path)} <<'{end}' || exit\n"
        f"{text.removesuffix(chr(10))}\n{end}\n"
    )


def _add_config_maps(job: JobObject, template: Values, kept_keys: TranslationNotes) -> Values:
    """Return the template with the variables of `envFrom`, which ConfigMaps of the file have.
    Others are refused.
    """
    pod = dict(at(template, "spec"))
    for key in ("initContainers", "containers"):
        if key in pod:
            pod[key] = [_add_own_maps(job, each, key, kept_keys) for each in pod[key] or ()]
    return {**template, "spec": pod}


def _add_own_maps(
    job: JobObject, container: Values, key: str, kept_keys: TranslationNotes
) -> Values:
    added = []
    for source in container.get("envFrom") or ():
        name = str(at(source, "configMapRef").get("name") or "")
        values = job.config_maps.get(name)
        if values is None:
            reason = "a secret of Cavvy has one value: name each variable in `env`, with "
            reason += "`secretKeyRef`, and set it with `cavvy secret set NAME`"
            if name:
                reason = f"the file has no ConfigMap {name}; put it into the same file, or "
                reason += "write the variables in `env`"
            optional = (at(source, each).get("optional") for each in source)
            say = kept_keys.note if any(optional) else kept_keys.refuse
            say(job.mark, f"spec.template.spec.{key}.envFrom", reason)
            continue
        prefix = source.get("prefix", "")
        added += [
            {"name": f"{prefix}{name}", "value": value.replace("$", "$$")}
            for name, value in values.items()
        ]
    return {**container, "env": [*added, *(container.get("env") or ())], "envFrom": []}


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

"""Exports a task as a custom job of Vertex AI: `cavvy export vertex TASK.YAML`."""

import shlex
from pathlib import PurePosixPath

from cavvy.domain.tasks import SpotPolicy, TaskSpec
from cavvy.providers.base import Refused
from cavvy.providers.formats.containers import ALONE, list_container_variables
from cavvy.providers.formats.index import FindOffers, JobFormat
from cavvy.providers.formats.machines import Machine, choose_machine
from cavvy.providers.formats.notes import list_notes, write_comments
from cavvy.providers.formats.program import copy_output, link_folder, make_program
from cavvy.providers.formats.vertex import request
from cavvy.providers.formats.vertex.request import CustomJobRequest, Strategy
from cavvy.providers.formats.yaml_text import dump_yaml

_COVERED = frozenset(["checkpoint", "limits.duration", "resources.spot", "retry", "workdir"])
_BUCKET = "gs://BUCKET"
_FOLDER = "/tmp/work"
# The program is in a variable with escaped references, because Vertex AI would replace references
# such as $(NAME) in a command.
_START = 'exec "$(command -v bash || command -v sh)" -c "$CAVVY_PROGRAM"'
# CLUSTER_SPEC contains the hosts and ports of both pools, and this host's own pool and index.
_RANKS = (
    'CAVVY_SPEC=$(printf %s "$CLUSTER_SPEC" | tr -d \' \\n"\')',
    "CAVVY_HOSTS=$(for each in workerpool0 workerpool1; do",
    '    printf %s "$CAVVY_SPEC" | sed -n "s/.*$each:\\[\\([^]]*\\)\\].*/\\1/p"; echo',
    "done | sed 's/:[0-9]*//g; /^$/d' | paste -s -d , -)",
    "MASTER_ADDR=${CAVVY_HOSTS%%,*}",
    "CAVVY_TASK=$(printf %s \"$CAVVY_SPEC\" | sed 's/.*task:{\\([^}]*\\)}.*/\\1/')",
    "NODE_RANK=$(printf %s \"$CAVVY_TASK\" | sed 's/.*index:\\([0-9]*\\).*/\\1/')",
    "case $CAVVY_TASK in *workerpool1*) NODE_RANK=$((NODE_RANK + 1)) ;; esac",
    "export CAVVY_HOSTS MASTER_ADDR NODE_RANK",
)


def make_export(task: TaskSpec, find_offers: FindOffers) -> str:
    """Return the specification as YAML for `gcloud ai custom-jobs create --config`. Raises
    Refused."""
    machine = choose_machine(
        task, find_offers, "gcp", "Vertex AI custom training", request.is_custom_job_type
    )
    job = _make_request(task, machine)
    document = dump_yaml(request.make_custom_job(job))
    notes = [*_list_steps(task), *list_notes(task, _COVERED | _list_copied(task))]
    return "\n".join([*write_comments("vertex", task, notes), document])


def _make_request(task: TaskSpec, machine: Machine) -> CustomJobRequest:
    kind = _find_accelerator(task, machine)
    variables = {
        **list_container_variables(task, machine.accelerators),
        "CAVVY_PROGRAM": _make_program(task),
    }
    if len(variables) > request.VARIABLES:
        raise Refused(f"env: a custom job has at most {request.VARIABLES} variables")
    return CustomJobRequest(
        image=task.image or "IMAGE",
        command=("sh", "-c", _START),
        environment=variables,
        machine_type=request.strip_gpus(machine.instance_type),
        accelerator_type=kind,
        accelerators=machine.accelerators,
        nodes=task.nodes,
        disk_gib=task.resources.disk_gib,
        strategy=Strategy.STANDARD if task.resources.spot is SpotPolicy.NEVER else Strategy.SPOT,
        longest_run=task.limits.duration,
        retries=task.retry.node != 0,
        restarts=task.nodes > 1,
    )


def _find_accelerator(task: TaskSpec, machine: Machine) -> str | None:
    offer = machine.offer
    if offer is not None and offer.accelerator is not None:
        kind = request.find_accelerator(
            machine.instance_type, offer.accelerator, offer.accelerator_memory_mib
        )
        if kind is None:
            raise Refused(f"resources.gpu: a custom job cannot request {offer.accelerator}")
        return kind
    if machine.accelerators:
        raise Refused(
            f"resources.instance: the accelerators of {machine.instance_type} are not known"
        )
    return None


def _make_program(task: TaskSpec) -> str:
    prepare = [*(_RANKS if task.nodes > 1 else ALONE)]
    prepare.append(f"mkdir -p {_FOLDER} && cd {_FOLDER} || exit 1")
    if task.workdir is not None:
        prepare.append(f"cp -R {_mounted(f'{_BUCKET}/{task.name}/workdir')}/. . || exit 1")
    for each in task.inputs:
        if each.source.startswith("gs://"):
            prepare += link_folder(_mounted(each.source), each.target, make=False)
    if task.checkpoint is not None:
        storage = task.checkpoint.storage or ""
        if not storage.startswith("gs://"):
            storage = f"{_BUCKET}/{task.name}/checkpoints"
        prepare += link_folder(_mounted(storage), task.checkpoint.path)
    finish = []
    for each in task.outputs:
        if each.target.startswith("gs://"):
            target, name = _mounted(each.target), PurePosixPath(each.source).name
            file = f"{target}/{name}" if each.target.endswith("/") else target
            finish += copy_output(each.source, shlex.quote(target), shlex.quote(file))
    return make_program(task, prepare, finish)


def _mounted(uri: str) -> str:
    """Return the path under which a container reads and writes the objects of a bucket."""
    return "/gcs/" + uri.removeprefix("gs://").rstrip("/")


def _list_copied(task: TaskSpec) -> frozenset[str]:
    """Return the task's keys whose files the program copies from or to Google Cloud Storage."""
    keys = {
        "inputs": all(each.source.startswith("gs://") for each in task.inputs),
        "outputs": all(each.target.startswith("gs://") for each in task.outputs),
    }
    return frozenset(key for key, is_so in keys.items() if is_so)


def _list_steps(task: TaskSpec) -> list[str]:
    labels = ",".join(f"{key}={value}" for key, value in task.tags.items())
    workdir = task.workdir
    source = f"a clone of {workdir.git}" if workdir and workdir.git else "the working folder"
    storage = task.checkpoint.storage if task.checkpoint else None
    steps = {
        f"Run: gcloud ai custom-jobs create --region=REGION --display-name={task.name} "
        f"--config={task.name}.yaml{f' --labels={labels}' if labels else ''}": True,
        f"Replace {_BUCKET} and /gcs/BUCKET with your own bucket.": workdir is not None
        or (task.checkpoint is not None and not (storage or "").startswith("gs://")),
        f"workdir: copy {source} to {_BUCKET}/{task.name}/workdir/ first, by gcloud storage cp "
        "--recursive": workdir is not None,
        "resources.spot: the job runs on spot machines only; Vertex AI does not change to "
        "on-demand": task.resources.spot is SpotPolicy.AUTO,
        "limits.duration: not set, so Vertex AI stops the job after 7 days (scheduling.timeout)": (
            task.limits.duration is None
        ),
        "retry: Vertex AI restarts the job only if Vertex AI fails or a machine is lost": True,
    }
    return [step for step, is_so in steps.items() if is_so]


FORMAT = JobFormat(title="Vertex AI custom training", write=make_export)

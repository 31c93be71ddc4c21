"""The job format of Vertex AI: builds the specification of a custom job, for the provider and for
`cavvy export vertex TASK.YAML`.

Fields and limits are from the discovery document of aiplatform v1.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from datetime import timedelta
from enum import StrEnum
from math import ceil
from pathlib import PurePosixPath
from typing import Any

from cavvy.domain.tasks import SpotPolicy, TaskSpec
from cavvy.domain.values import Struct, field
from cavvy.providers.base import Refused
from cavvy.providers.formats import FindOffers, JobFormat, Machine, choose_machine, program
from cavvy.providers.formats.notes import dump_yaml, list_notes, write_comments

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

VARIABLES = 100  # maximum number of variables of a container
ANY_RESERVATION = "ANY_RESERVATION"  # any reservation that fits the machines

# (the catalog's name, memory in GiB or 0 if there is only one size) -> accelerator type in
# MachineSpec
_ACCELERATORS = {
    ("P4", 0): "NVIDIA_TESLA_P4",
    ("P100", 0): "NVIDIA_TESLA_P100",
    ("V100", 0): "NVIDIA_TESLA_V100",
    ("T4", 0): "NVIDIA_TESLA_T4",
    ("L4", 0): "NVIDIA_L4",
    ("A100", 40): "NVIDIA_TESLA_A100",
    ("A100", 80): "NVIDIA_A100_80GB",
    ("H100", 0): "NVIDIA_H100_80GB",
    ("H200", 0): "NVIDIA_H200_141GB",
    ("B200", 0): "NVIDIA_B200",
    ("GB200", 0): "NVIDIA_GB200",
    ("RTX-PRO-6000", 0): "NVIDIA_RTX_PRO_6000",
}
_MEGA = "NVIDIA_H100_MEGA_80GB"  # the accelerator type of the machines a3-megagpu-8g
# Kind of machine types without accelerators -> the smallest number of CPUs:
# https://cloud.google.com/vertex-ai/docs/training/configure-compute
_LEAST_CPUS = {"standard": 4, "highmem": 2, "highcpu": 16}
_CPU_TYPE = re.compile(r"(e2|n1|n2|c2)-(standard|highmem|highcpu)-(\d+)")
_GPU_FAMILIES = ("a2-", "a3-", "a4-", "g2-", "g4-")
# The catalog's name of an N1 machine with GPUs, such as n1-standard-8-t4x1.
_WITH_GPUS = re.compile(r"(n1-\w+-\d+)-\w+x\d+")


class Strategy(StrEnum):
    """How Vertex AI provisions the machines of a job."""

    STANDARD = "STANDARD"
    SPOT = "SPOT"
    FLEX_START = "FLEX_START"


class CustomJobRequest(Struct, frozen=True, kw_only=True):
    """The values of a request to Vertex AI. All machines have the same type; the first machine is
    in its own worker pool. `waits` applies to FLEX_START.
    """

    image: str
    command: Sequence[str]
    # Vertex AI does not replace references in the values
    environment: Mapping[str, str] = field(default_factory=dict)
    machine_type: str
    accelerator_type: str | None = None
    accelerators: int = 0
    nodes: int = 1
    disk_gib: int | None = None
    strategy: Strategy = Strategy.STANDARD
    longest_run: timedelta | None = None  # None: the service's default of 7 days
    longest_wait: timedelta | None = None
    retries: bool = True  # whether Vertex AI starts the job again after faults of Vertex AI
    restarts: bool = False  # whether all machines are restarted if one was restarted
    service_account: str | None = None
    network: str | None = None
    # projects/PROJECT/zones/ZONE/reservations/NAME, or ANY_RESERVATION; None for none
    reservation: str | None = None
    output_uri: str | None = None


def find_accelerator(machine_type: str, name: str, memory_mib: int) -> str | None:
    """Return Vertex AI's name for the catalog's accelerator on this machine type, or None if Vertex
    AI has no such accelerator.
    """
    if machine_type.startswith("a3-megagpu"):
        return _MEGA
    return _ACCELERATORS.get((name, 0)) or _ACCELERATORS.get((name, round(memory_mib / 1024)))


def is_custom_job_type(machine_type: str) -> bool:
    """Return whether custom jobs can use this machine type of the catalog."""
    if machine_type.startswith(_GPU_FAMILIES) or _WITH_GPUS.fullmatch(machine_type):
        return True
    found = _CPU_TYPE.fullmatch(machine_type)
    return found is not None and int(found[3]) >= _LEAST_CPUS[found[2]]


def strip_gpus(machine_type: str) -> str:
    """Return Google's name of a machine type: the catalog's name without the attached GPUs."""
    found = _WITH_GPUS.fullmatch(machine_type)
    return found[1] if found else machine_type


def make_custom_job(job: CustomJobRequest) -> dict[str, Any]:
    """Return the CustomJobSpec of the job."""
    pools = [_make_pool(job, 1)]
    if job.nodes > 1:
        pools.append(_make_pool(job, job.nodes - 1))
    spec: dict[str, Any] = {"workerPoolSpecs": pools, "scheduling": _make_scheduling(job)}
    if job.output_uri is not None:
        spec["baseOutputDirectory"] = {"outputUriPrefix": job.output_uri}
    if job.service_account is not None:
        spec["serviceAccount"] = job.service_account
    if job.network is not None:
        spec["network"] = job.network
    return spec


def _make_pool(job: CustomJobRequest, count: int) -> dict[str, Any]:
    machine: dict[str, Any] = {"machineType": job.machine_type}
    if job.accelerator_type is not None:
        machine["acceleratorType"] = job.accelerator_type
        machine["acceleratorCount"] = job.accelerators
    if job.reservation is not None:
        machine["reservationAffinity"] = _make_affinity(job.reservation)
    pool: dict[str, Any] = {"machineSpec": machine, "replicaCount": count}
    if job.disk_gib is not None:
        pool["diskSpec"] = {"bootDiskSizeGb": max(job.disk_gib, 100)}
    pool["containerSpec"] = {
        "imageUri": job.image,
        "command": list(job.command),
        "env": [
            {"name": name, "value": program.escape_references(text)}
            for name, text in job.environment.items()
        ],
    }
    return pool


def _make_affinity(reservation: str) -> dict[str, Any]:
    if reservation == ANY_RESERVATION:
        return {"reservationAffinityType": ANY_RESERVATION}
    return {
        "reservationAffinityType": "SPECIFIC_RESERVATION",
        "key": "compute.googleapis.com/reservation-name",
        "values": [reservation],
    }


def _make_scheduling(job: CustomJobRequest) -> dict[str, Any]:
    scheduling: dict[str, Any] = {"strategy": str(job.strategy)}
    if job.longest_run is not None:
        scheduling["timeout"] = f"{ceil(job.longest_run.total_seconds())}s"
    if job.longest_wait is not None and job.strategy is Strategy.FLEX_START:
        scheduling["maxWaitDuration"] = f"{ceil(job.longest_wait.total_seconds())}s"
    if not job.retries:
        scheduling["disableRetries"] = True
    elif job.restarts:
        scheduling["restartJobOnWorkerRestart"] = True
    return scheduling


def make_export(task: TaskSpec, find_offers: FindOffers) -> str:
    """Return the specification as YAML for `gcloud ai custom-jobs create --config`. Raises
    Refused."""
    machine = choose_machine(
        task, find_offers, "gcp", "Vertex AI custom training", is_custom_job_type
    )
    job = _make_request(task, machine)
    document = dump_yaml(make_custom_job(job))
    notes = [*_list_steps(task), *list_notes(task, _COVERED | _list_copied(task))]
    return "\n".join([*write_comments("vertex", task, notes), document])


def _make_request(task: TaskSpec, machine: Machine) -> CustomJobRequest:
    kind = _find_accelerator(machine)
    variables = {
        **program.list_container_variables(task, machine.accelerators),
        "CAVVY_PROGRAM": _make_program(task),
    }
    if len(variables) > VARIABLES:
        raise Refused(f"env: a custom job has at most {VARIABLES} variables")
    return CustomJobRequest(
        image=task.image or "IMAGE",
        command=("sh", "-c", _START),
        environment=variables,
        machine_type=strip_gpus(machine.instance_type),
        accelerator_type=kind,
        accelerators=machine.accelerators,
        nodes=task.nodes,
        disk_gib=task.resources.disk_gib,
        strategy=Strategy.STANDARD if task.resources.spot is SpotPolicy.NEVER else Strategy.SPOT,
        longest_run=task.limits.duration,
        retries=task.retry.node != 0,
        restarts=task.nodes > 1,
    )


def _find_accelerator(machine: Machine) -> str | None:
    offer = machine.offer
    if offer is not None and offer.accelerator is not None:
        kind = find_accelerator(
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
    prepare = [*(_RANKS if task.nodes > 1 else program.ALONE)]
    prepare.append(f"mkdir -p {_FOLDER} && cd {_FOLDER} || exit 1")
    if task.workdir is not None:
        prepare.append(f"cp -R {_mounted(f'{_BUCKET}/{task.name}/workdir')}/. . || exit 1")
    for each in task.inputs:
        if each.source.startswith("gs://"):
            prepare += program.link_folder(_mounted(each.source), each.target, make=False)
    if task.checkpoint is not None:
        storage = task.checkpoint.storage or ""
        if not storage.startswith("gs://"):
            storage = f"{_BUCKET}/{task.name}/checkpoints"
        prepare += program.link_folder(_mounted(storage), task.checkpoint.path)
    finish = []
    for each in task.outputs:
        if each.target.startswith("gs://"):
            target, name = _mounted(each.target), PurePosixPath(each.source).name
            file = f"{target}/{name}" if each.target.endswith("/") else target
            finish += program.copy_output(each.source, shlex.quote(target), shlex.quote(file))
    return program.make_program(task, prepare, finish)


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

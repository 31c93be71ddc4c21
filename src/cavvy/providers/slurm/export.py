"""Exports a task as an sbatch script that runs without Cavvy: `cavvy export slurm TASK.YAML`."""

import shlex
from datetime import timedelta

from cavvy.domain.offers import Offer
from cavvy.domain.tasks import TaskSpec
from cavvy.providers.batch.export import (
    STAY,
    here_document,
    list_exports,
    list_notes,
    list_port_lines,
    list_secret_lines,
    make_header,
    make_work,
    take_first_choice,
)
from cavvy.providers.batch.shapes import shards_of
from cavvy.providers.batch.system import WAIT, JobOptions
from cavvy.providers.slurm.script import format_length, gres_of, make_srun, place_together

_MINUTE = timedelta(minutes=1)
# The CPUs that the job has on each node, or on the smallest of its nodes if it asked for no number.
_CPUS = (
    "CAVVY_CPUS=${SLURM_CPUS_PER_TASK:-"
    """$(echo "$SLURM_JOB_CPUS_PER_NODE" | tr , '\\n' | sed 's/(.*//' | sort -n | head -n 1)}"""
)

# Each task of the step reads its rank.
_RUN = f'NODE_RANK=$SLURM_PROCID exec bash -c "{STAY}; $CAVVY_WORK"'


def make_export(
    task: TaskSpec, offer: Offer | None, nodes: int, job_options: JobOptions, qos: str
) -> str:
    """Return the script for sbatch. If `offer` is None, the script requests the accelerators, CPUs
    and memory named in the task.
    """
    if offer is None:
        task = take_first_choice(task)
    shards = shards_of(offer)[0] if offer else 0
    options = [
        f"--job-name={task.name}",
        f"--nodes={nodes}",
        *place_together(task.topology, nodes, job_options.topology),
        "--ntasks-per-node=1",
        *_size(task, offer),
        *([f"--account={job_options.account}"] if job_options.account else []),
        *([f"--qos={qos}"] if qos else []),
        *([f"--time={_limit(task.limits.duration)}"] if task.limits.duration else []),
        *job_options.options,
        f"--signal=B:USR1@{job_options.warning_s}",
        "--no-requeue",
        "--output=%x-%j.log",
    ]
    lines = [
        *make_header("slurm", "#SBATCH", options, task, list_notes(task)),
        *list_secret_lines(task, "the environment of sbatch"),
        *list_exports(task, nodes),
        'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        'CAVVY_HOSTS=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -s -d , -)',
        *list_port_lines("SLURM_JOB_ID"),
        "NPROC_PER_NODE=${SLURM_GPUS_ON_NODE:-1}",
        _CPUS,
        f"CAVVY_WORK=$(cat {here_document(make_work(task))}\n)",
        "export MASTER_ADDR MASTER_PORT CAVVY_HOSTS NPROC_PER_NODE CAVVY_WORK",
        "trap : USR1 TERM # ignored: USR1 only warns of the time limit; "
        "at the limit, Slurm sends SIGTERM to the work too",
        make_srun(nodes, '"$CAVVY_CPUS"', shards, ends_together=True) + " --export=ALL \\",
        f"    bash -c {shlex.quote(_RUN)} &",
        WAIT.format(process="$!"),
        "exit $code",
    ]
    return "\n".join(lines) + "\n"


def _limit(length: timedelta) -> str:
    """Return the time limit, rounded up to whole minutes: Slurm counts no seconds."""
    return format_length(-(-length // _MINUTE) * _MINUTE)


def _size(task: TaskSpec, offer: Offer | None) -> list[str]:
    if offer is not None:
        gres = gres_of(offer)
        return [
            *([f"--partition={offer.zone}"] if offer.zone else []),
            f"--cpus-per-task={max(1, int(offer.vcpus))}",
            f"--mem={offer.memory_mib}M",
            *([f"--gres={gres}"] if gres else []),
        ]
    need = task.resources
    gpu = need.accelerators[0] if need.accelerators else None
    kind = f":{gpu.name.lower()}" if gpu is not None and gpu.name else ""
    memory = need.least_memory_mib(max(1, round(need.cpus_min or 1)))
    return [
        *([f"--cpus-per-task={max(1, round(need.cpus_min))}"] if need.cpus_min else []),
        *([f"--mem={memory}M"] if memory else []),
        *([f"--gres=gpu{kind}:{gpu.count_min}"] if gpu is not None else []),
    ]

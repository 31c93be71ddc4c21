"""Builds the batch job of one gang: the options of sbatch, and the script for sbatch's input.

Also exports a task as an sbatch script that runs without Cavvy: `cavvy export slurm TASK.YAML`.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from datetime import timedelta

from cavvy.domain.offers import Offer
from cavvy.domain.slurm_options import SIZES, TAKEN_OPTIONS
from cavvy.domain.tasks import TaskSpec, TopologyNeed, VolumeKind
from cavvy.providers.base import GangSpec, Refused
from cavvy.providers.batch import export
from cavvy.providers.batch.shapes import gpu_of, shards_of
from cavvy.providers.batch.system import WAIT, ClusterQueue, JobFiles, JobOptions, time_limit

# the values of the setting `topology` that are not lists of node features
SWITCH, BLOCK = "switch", "block"
# Before the time limit, Slurm signals the script only (B:), because a signal to the step would
# reach the work itself. Only one job can create the folder `started`. So if a lost reply or a
# requeue by Slurm leads to a second job of this gang, the second job exits at once. The files
# `begun` and `end` describe jobs that slurmctld no longer lists.
_SCRIPT = """#!/bin/sh
# Cavvy: one agent on each node of {name}; see docs/guides/slurm.md.
umask 077
cd {folder} || exit 0
[ -e removing ] && exit 0
mkdir started || exit 0
[ -e job ] || {{ echo "$SLURM_JOB_ID" > .job.$$ && mv .job.$$ job; }}
echo "$(date +%s) $SLURM_JOB_NODELIST" > .begun && mv .begun begun
if {bare} && ! command -v {python} >/dev/null; then
    echo "$(hostname) has no {shown}; name a Python 3.8 or newer by the setting python" > refusal
    exit 78
fi
trap ': > warned' USR1
trap : TERM
{own_script}{boxed}{srun}{container} \\
    sh -c 'exec "$0" -I -S "$1/start.py" "$1/agent" "$2" "$SLURM_PROCID"' \\
    {python} {agent} {folder} &
{wait}
echo "$code $(date +%s)" > .end && mv .end end
exit $code
"""

# For a task that is a batch script: what Slurm has told this script, which is then the script's
# own, and not the step's of the agents. Without the variables of sbatch's sizes, the agents' step
# has all that the job has.
_OWN_SCRIPT = """\
export -p | grep '^export SLURM' > .batch.env && mv .batch.env batch.env
export CAVVY_BATCH={folder}
agent_cpus="${{SLURM_CPUS_ON_NODE:-1}}"
unset SLURM_NTASKS SLURM_NPROCS SLURM_NTASKS_PER_NODE SLURM_TASKS_PER_NODE SLURM_NTASKS_PER_GPU \\
    SLURM_CPUS_PER_TASK SLURM_CPUS_PER_GPU SLURM_TRES_PER_TASK SLURM_GPUS SLURM_GPUS_PER_TASK \\
    SLURM_GPUS_PER_NODE SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU SLURM_MEM_PER_NODE SLURM_DISTRIBUTION
"""
_MINUTE = timedelta(minutes=1)
# The CPUs that the job has on each node, or on the smallest of its nodes if it asked for no number.
_CPUS = (
    "CAVVY_CPUS=${SLURM_CPUS_PER_TASK:-"
    """$(echo "$SLURM_JOB_CPUS_PER_NODE" | tr , '\\n' | sed 's/(.*//' | sort -n | head -n 1)}"""
)

# Each task of the step reads its rank.
_RUN = f'NODE_RANK=$SLURM_PROCID exec bash -c "{export.STAY}; $CAVVY_WORK"'


def read_own_options(gang: GangSpec, partitions: Sequence[str] = ()) -> Mapping[str, str]:
    """Return the options of sbatch that the task sets, by name. `partitions` are those that the
    settings allow, or () for all. Raises Refused.
    """
    found: dict[str, str] = {}
    for each in gang.options.get("sbatch") or ():
        name, given, value = str(each).removeprefix("--").partition("=")
        if name not in TAKEN_OPTIONS or not str(each).startswith("--"):
            raise Refused(f"a task cannot set the option {each} of sbatch")
        if name == "partition" and partitions and value not in partitions:
            raise Refused(
                f"the task wants the partition {value}, and the setting `partitions` of "
                f"[providers.slurm] allows {', '.join(partitions)}"
            )
        found[name] = f"--{name}{given}{value}"
    return found


def make_options(
    gang: GangSpec,
    queue: ClusterQueue,
    files: JobFiles,
    job_options: JobOptions,
    qos: str,
    own: Mapping[str, str] = {},
) -> Sequence[str]:
    """Return the options of sbatch. Cavvy's own options come last, so that the settings, and the
    options `own` of the task, cannot override them.
    """
    offer = gang.offer
    stated = {what for what, names in SIZES.items() if own.keys() & {*names}}
    gres = gres_of(offer)
    sizes = {
        "cpus": ["--ntasks-per-node=1", f"--cpus-per-task={max(1, int(offer.vcpus))}"],
        "memory": [f"--mem={offer.memory_mib}M"],
        "gpus": [f"--gres={gres}"] if gres else [],
    }
    return [
        f"--partition={queue.name}",
        *own.values(),
        *([f"--account={job_options.account}"] if job_options.account else []),
        *([f"--qos={qos}"] if qos else []),
        f"--time={format_length(time_limit(gang, queue))}",
        *job_options.options,
        f"--job-name={gang.name}",
        f"--comment={files.mark}",
        f"--nodes={gang.nodes}",
        *place_together(gang.topology, gang.nodes, job_options.topology),
        *(option for what, given in sizes.items() if what not in stated for option in given),
        f"--signal=B:USR1@{job_options.warning_s}",
        "--no-requeue",
        "--export=ALL",
        f"--chdir={files.folder}",
        f"--output={files.folder}/batch.log",
        "--open-mode=append",
    ]


def place_together(
    need: TopologyNeed | None, nodes: int, names: Mapping[str, str]
) -> Sequence[str]:
    """Return the options that place nodes close to each other
    (https://slurm.schedmd.com/sbatch.html)."""
    if need is None:
        return []
    same, prefer = (names.get(label or "", "") for label in (need.same, need.prefer))
    found = ["--switches=1"] if prefer == SWITCH else []
    if same == BLOCK:
        found.append(f"--segment={need.slice or nodes}")
    elif same:
        found.append(f"--constraint=[{same}]")
    return found


def object_to_topology(need: TopologyNeed, job_options: JobOptions) -> str:
    """Return why Slurm cannot place nodes as required, or ""."""
    same = job_options.topology[need.same or ""]
    if same == SWITCH:
        return (
            "Slurm keeps nodes on one switch only for `max_switch_wait`, and then starts the job "
            "anyway; write `prefer` instead of `same`"
        )
    if same == BLOCK:
        return ""
    if need.slice is not None:
        return "with node features, Slurm cannot place slices; delete `slice`"
    if any(re.match(r"-C|--constraint", each) for each in job_options.options):
        return "the setting `sbatch_options` already has a constraint, and a job has only one"
    return ""


def make_script(gang: GangSpec, files: JobFiles, python: str, *, pyxis: bool = False) -> str:
    """Return the job's script. If `pyxis` is True, the job step runs in the gang's image with the
    image's own Python.
    """
    own_script = "sbatch" in gang.options
    folders = (files.agent, files.folder)
    container = list_container_options(gang, folders) if pyxis and gang.image else []
    folder = shlex.quote(files.folder)
    return _SCRIPT.format(
        own_script=_OWN_SCRIPT.format(folder=folder) if own_script else "",
        bare="false" if container else "true",
        boxed="CAVVY_BOXED=1 " if container else "",
        container="".join(f" {shlex.quote(each)}" for each in container),
        name=gang.name,
        folder=folder,
        agent=shlex.quote(files.agent),
        python=shlex.quote(python),
        shown=python.replace('"', ""),
        srun=make_srun(
            gang.nodes,
            '"$agent_cpus"' if own_script else str(max(1, int(gang.offer.vcpus))),
            shards_of(gang.offer)[0],
            ends_together=False,
            overlaps=own_script,
        ),
        wait=WAIT.format(process="$!"),
    )


def make_srun(
    nodes: int, cpus: str, shards: int, *, ends_together: bool, overlaps: bool = False
) -> str:
    """Return the start of an srun command that runs one task on each node. Since Slurm 22.05, srun
    no longer reads the number of CPUs of sbatch, so `cpus` is passed on.
    https://slurm.schedmd.com/archive/slurm-22.05.0/srun.html#OPT_cpus-per-task
    The job's `shards` of a GPU are repeated without their type, with which Slurm 22.05 makes no
    step. A step that `overlaps` leaves what it has to other steps, too.
    """
    gres = f" --gres=shard:{shards}" if shards else ""
    gres += " --overlap" if overlaps else ""
    return (
        f"srun --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1 --cpus-per-task={cpus} \\\n"
        f"    --kill-on-bad-exit={int(ends_together)} --wait=0 --mpi=none --unbuffered{gres}"
    )


def list_container_options(gang: GangSpec, folders: Sequence[str]) -> Sequence[str]:
    """Return the options that Pyxis adds to srun (github.com/NVIDIA/pyxis, "Usage")."""
    mounts = [f"{folder}:{folder}" for folder in folders]
    mounts += [
        f"{each.source}:{each.path}{':ro' if each.read_only else ''}"
        for each in gang.volumes
        if each.kind is VolumeKind.HOST and each.path.startswith("/")
    ]
    return [
        f"--container-image={name_for_enroot(gang.image or '')}",
        f"--container-mounts={','.join(mounts)}",
        "--no-container-mount-home",
        "--container-writable",
        "--no-container-entrypoint",
    ]


def name_for_enroot(image: str) -> str:
    """Return the image's name in Enroot's form, which has a # between the registry and the rest of
    the name.
    """
    first, slash, rest = image.partition("/")
    return (
        f"{first}#{rest}"
        if slash and ("." in first or ":" in first or first == "localhost")
        else image
    )


def format_length(length: timedelta | None) -> str:
    """Return a time limit for sbatch, rounded down to whole minutes."""
    if length is None:
        return "UNLIMITED"
    minutes = max(1, length // timedelta(minutes=1))
    return f"{minutes // 1440}-{minutes // 60 % 24:02}:{minutes % 60:02}:00"


def gres_of(offer: Offer) -> str:
    """Return the --gres value for the offer's accelerators, or "" if the offer has none."""
    if not offer.accelerator_count:
        return ""
    shards, _ = shards_of(offer)
    kind, count = ("shard", shards) if shards else ("gpu", offer.accelerator_count)
    return ":".join(filter(None, (kind, gpu_of(offer), str(count))))


def make_export(
    task: TaskSpec, offer: Offer | None, nodes: int, job_options: JobOptions, qos: str
) -> str:
    """Return the script for sbatch. If `offer` is None, the script requests the accelerators, CPUs
    and memory named in the task.
    """
    if offer is None:
        task = export.take_first_choice(task)
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
        *export.make_header("slurm", "#SBATCH", options, task, export.list_notes(task)),
        *export.list_secret_lines(task, "the environment of sbatch"),
        *export.list_exports(task, nodes),
        'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        'CAVVY_HOSTS=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -s -d , -)',
        *export.list_port_lines("SLURM_JOB_ID"),
        "NPROC_PER_NODE=${SLURM_GPUS_ON_NODE:-1}",
        _CPUS,
        f"CAVVY_WORK=$(cat {export.here_document(export.make_work(task))}\n)",
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

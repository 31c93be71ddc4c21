"""A task as a script for qsub that needs no Cavvy: `cavvy export pbs TASK.YAML`."""

from cavvy.domain.offers import Offer
from cavvy.domain.tasks import Task
from cavvy.providers.batch.export import here_document, list_exports, list_notes, make_work
from cavvy.providers.batch.shapes import gpu_of
from cavvy.providers.pbs.script import PbsOptions, format_length


def make_export(task: Task, offer: Offer | None, nodes: int, job_options: PbsOptions) -> str:
    """The script; `offer` None: the accelerators, CPUs and memory that the task itself names.

    Nodes beyond the first are started by `pbsdsh`, which hands no variables over: they read a file
    of the folder that the job was submitted from.
    """
    options = [
        f"-N {task.name[:15]}",
        f"-l select={_chunk(task, offer, nodes, job_options)}",
        "-l place=scatter",
        *([f"-q {offer.zone}"] if offer is not None and offer.zone else []),
        *([f"-A {job_options.account}"] if job_options.account else []),
        *([f"-l walltime={format_length(task.limits.duration)}"] if task.limits.duration else []),
        "-r n",
        "-j oe",
    ]
    work = "\n".join(
        [
            *list_exports(task, nodes),
            'export MASTER_ADDR="$1" CAVVY_HOSTS="$2" NODE_RANK="${PBS_NODENUM:-0}"',
            'export NPROC_PER_NODE="${NGPUS:-1}"',
            'cd "$3" || exit 1',
            make_work(task),
        ]
    )
    lines = [
        "#!/bin/bash",
        *(f"#PBS {option}" for option in options),
        f"# Made by `cavvy export pbs TASK.YAML` from the task {task.name}.",
        *(f"# {note}" for note in list_notes(task)),
        'cd "$PBS_O_WORKDIR" || exit 1',
        'work="$PBS_O_WORKDIR/.$PBS_JOBID.sh"',
        f'cat > "$work" {here_document(work)}',
        "trap 'rm -f \"$work\"' EXIT",
        'hosts=$(sort -u "$PBS_NODEFILE" | paste -s -d , -)',
        'first=$(head -n 1 "$PBS_NODEFILE")',
        *(
            ['bash "$work" "$first" "$hosts" "$PBS_O_WORKDIR"']
            if nodes == 1
            else ['pbsdsh -- bash "$work" "$first" "$hosts" "$PBS_O_WORKDIR"']
        ),
    ]
    return "\n".join(lines) + "\n"


def _chunk(task: Task, offer: Offer | None, nodes: int, job_options: PbsOptions) -> str:
    need = task.resources
    if offer is not None:
        cpus, memory, gpus = max(1, int(offer.vcpus)), offer.memory_mib, offer.accelerator_count
        kind = gpu_of(offer)
    else:
        gpu = need.accelerators[0] if need.accelerators else None
        cpus, gpus = max(1, round(need.cpus_min or 1)), gpu.count_min if gpu else 0
        memory = need.least_memory_mib(cpus)
        kind = ""
    chunk = f"{nodes}:ncpus={cpus}"
    chunk += f":mem={memory}mb" if memory else ""
    chunk += f":ngpus={gpus}" if gpus else ""
    return chunk + (
        f":{job_options.gpu_resource}={kind}" if job_options.gpu_resource and kind else ""
    )

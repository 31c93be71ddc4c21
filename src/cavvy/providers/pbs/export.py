"""Exports a task as a qsub script that runs without Cavvy: `cavvy export pbs TASK.YAML`."""

from cavvy.domain.offers import Offer
from cavvy.domain.tasks import TaskSpec
from cavvy.providers.batch.export import here_document, list_exports, make_header, make_work
from cavvy.providers.batch.system import JobOptions
from cavvy.providers.pbs.script import format_length, make_chunk


def make_export(
    task: TaskSpec, offer: Offer | None, nodes: int, job_options: JobOptions, gpu_resource: str
) -> str:
    """Return the script for qsub. If `offer` is None, the script requests the accelerators, CPUs
    and memory named in the task.

    `pbsdsh` starts the work on the nodes, but does not pass environment variables on. Therefore the
    nodes read the environment variables from a file in the folder from which the job was submitted.
    """
    options = [
        f"-N {task.name[:15]}",
        f"-l select={nodes}:{_chunk(task, offer, gpu_resource)}",
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
        *make_header("pbs", "#PBS", options, task),
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


def _chunk(task: TaskSpec, offer: Offer | None, gpu_resource: str) -> str:
    if offer is not None:
        return make_chunk(offer, gpu_resource)
    need = task.resources
    cpus = max(1, round(need.cpus_min or 1))
    memory = need.least_memory_mib(cpus)
    gpus = need.accelerators[0].count_min if need.accelerators else 0
    memory_part = f":mem={memory}mb" if memory else ""
    return f"ncpus={cpus}{memory_part}" + (f":ngpus={gpus}" if gpus else "")

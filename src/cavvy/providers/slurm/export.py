"""Exports a task as an sbatch script that runs without Cavvy: `cavvy export slurm TASK.YAML`."""

from cavvy.domain.offers import Offer
from cavvy.domain.tasks import TaskSpec
from cavvy.providers.batch.export import here_document, list_exports, make_header, make_work
from cavvy.providers.batch.system import JobOptions
from cavvy.providers.slurm.script import format_length, gres_of


def make_export(
    task: TaskSpec, offer: Offer | None, nodes: int, job_options: JobOptions, qos: str
) -> str:
    """Return the script for sbatch. If `offer` is None, the script requests the accelerators, CPUs
    and memory named in the task.
    """
    options = [
        f"--job-name={task.name}",
        f"--nodes={nodes}",
        "--ntasks-per-node=1",
        *_size(task, offer),
        *([f"--account={job_options.account}"] if job_options.account else []),
        *([f"--qos={qos}"] if qos else []),
        *([f"--time={format_length(task.limits.duration)}"] if task.limits.duration else []),
        *job_options.options,
        f"--signal=B:USR1@{job_options.warning_s}",
        "--no-requeue",
        "--output=%x-%j.log",
    ]
    lines = [
        *make_header("slurm", "#SBATCH", options, task),
        *list_exports(task, nodes),
        'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        'CAVVY_HOSTS=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -s -d , -)',
        "NPROC_PER_NODE=${SLURM_GPUS_ON_NODE:-1}",
        f"CAVVY_WORK=$(cat {here_document(make_work(task))}\n)",
        "export MASTER_ADDR CAVVY_HOSTS NPROC_PER_NODE CAVVY_WORK",
        "trap : USR1 # ignored: it only warns of the time limit; "
        "at the limit, srun passes SIGTERM on to the work",
        "srun --kill-on-bad-exit=1 "
        """bash -c 'export NODE_RANK=$SLURM_PROCID; eval "$CAVVY_WORK"' &""",
        "while :; do",
        "    wait $!",
        "    code=$?",
        "    kill -0 $! 2>/dev/null || exit $code",
        "done",
    ]
    return "\n".join(lines) + "\n"


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

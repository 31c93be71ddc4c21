"""Builds the batch job of one gang: the options of qsub, and the script for qsub's input.

Also exports a task as a qsub script that runs without Cavvy: `cavvy export pbs TASK.YAML`.
"""

import shlex
from collections.abc import Sequence
from datetime import timedelta

from cavvy.domain.offers import Offer
from cavvy.domain.tasks import TaskSpec, TopologyNeed
from cavvy.providers.base import GangSpec
from cavvy.providers.batch import export
from cavvy.providers.batch.shapes import gpu_of
from cavvy.providers.batch.system import WAIT, ClusterQueue, JobFiles, JobOptions, time_limit

# Shell text that lists the job's hosts in the order of the ranks, as pbsdsh numbers them.
HOSTS = """$(awk '!seen[$0]++' "$PBS_NODEFILE" | paste -s -d , -)"""
# the environment variable that marks an installation's jobs
MARK = "CAVVY_MARK"
# As in Slurm's script, only one job can create the folder `started`, and the files `begun` and
# `end` describe jobs that the server no longer lists. PBS sends no signal before the walltime ends,
# so the script itself waits for the time of the warning.
_SCRIPT = """#!/bin/sh
# Cavvy: one agent on each node of {name}; see docs/guides/pbs.md.
umask 077
cd {folder} || exit 0
[ -e removing ] && exit 0
mkdir started || exit 0
exec >>batch.log 2>&1
[ -e job ] || {{ echo "$PBS_JOBID" > .job.$$ && mv .job.$$ job; }}
echo "$(date +%s) {hosts}" > .begun && mv .begun begun
if ! command -v {python} >/dev/null; then
    echo "$(hostname) has no {shown}; name a Python 3.8 or newer by the setting python" > refusal
    exit 78
fi
trap : TERM
{warning}{start} &
agents=$!
{wait}
echo "$code $(date +%s)" > .end && mv .end end
[ -z "$watch" ] || kill $watch
exit $code
"""
_WARNING = """(trap 'kill $!; exit' TERM; sleep {seconds} & wait $! && : > warned) &
watch=$!
"""
_ALONE = "{python} -I -S {agent}/start.py {agent}/agent {folder} 0"
_EACH = (
    """pbsdsh -- /bin/sh -c 'exec "$0" -I -S "$1/start.py" "$1/agent" "$2" "$PBS_NODENUM"' """
    "{python} {agent} {folder}"
)

_LONGEST_NAME = 15  # characters; newer servers accept 236
# The job's number, and an index for each job of an array: 123.server or 123[4].server.
_NUMBER = "$(echo \"$PBS_JOBID\" | sed 's/[^0-9[].*//; s/\\[/ + /; s/[^0-9 +]//g; s/+ *$//')"
_ARGUMENTS = '"$folder" "$MASTER_ADDR" "$MASTER_PORT" "$hosts"'
# Runs on each node: the work, then a file with its exit code. PBS signals all processes of the job,
# so this shell ignores SIGTERM to outlive the work.
_RANK = """trap : TERM
bash "$1/work.sh" "$@"
echo $? > "$1/.code.$PBS_NODENUM" && mv "$1/.code.$PBS_NODENUM" "$1/code.$PBS_NODENUM"
"""
# pbsdsh does not report the exit codes of its tasks. The script therefore waits for the files with
# these codes. When the script ends, PBS ends the work on the other nodes. A file may become visible
# late on a shared file system.
_WAIT = """pbsdsh -- bash -l "$folder/rank.sh" {arguments} &
left=60 # seconds to wait for codes after pbsdsh has ended
while :; do
    codes=$(cat "$folder"/code.* 2>/dev/null)
    for code in $codes; do [ "$code" = 0 ] || exit "$code"; done
    [ "$(echo "$codes" | grep -c .)" -lt {nodes} ] || exit 0
    kill -0 $! 2>/dev/null || left=$((left - 1))
    [ $left -gt 0 ] || {{ echo "the work of some nodes ended without an exit code" >&2; exit 1; }}
    sleep 1
done"""


def make_options(
    gang: GangSpec, queue: ClusterQueue, mark: str, job_options: JobOptions, gpu_resource: str
) -> Sequence[str]:
    """Return the options of qsub. Cavvy's own options come last, so that the settings cannot
    override them.

    If `gpu_resource` is "", any model of GPU is accepted.
    """
    length = time_limit(gang, queue)
    return [
        *(["-A", job_options.account] if job_options.account else []),
        *job_options.options,
        *("-q", queue.name),
        *("-N", gang.name),
        *("-l", f"select={gang.nodes}:{make_chunk(gang.offer, gpu_resource)}"),
        *("-l", f"place=scatter{group_nodes(gang.topology, job_options)}"),
        *(["-l", f"walltime={format_length(length)}"] if length else []),
        *("-r", "n"),
        *("-v", f"{MARK}={mark}"),
        *("-j", "oe"),
        *("-o", "/dev/null"),
        *("-m", "n"),
    ]


def group_nodes(need: TopologyNeed | None, job_options: JobOptions) -> str:
    """Return the part of `place` by which all nodes have the same value of a resource, or ""."""
    resource = job_options.topology.get((need and need.same) or "")
    return f":group={resource}" if resource else ""


def make_chunk(offer: Offer, gpu_resource: str) -> str:
    """Return the resources of one node, for the option `select`."""
    memory = f":mem={offer.memory_mib}mb" if offer.memory_mib else ""
    chunk = f"ncpus={max(1, int(offer.vcpus))}{memory}"
    if not offer.accelerator_count:
        return chunk
    kind = f":{gpu_resource}={gpu_of(offer)}" if gpu_resource and gpu_of(offer) else ""
    return f"{chunk}:ngpus={offer.accelerator_count}{kind}"


def make_script(
    gang: GangSpec, queue: ClusterQueue, files: JobFiles, job_options: JobOptions
) -> str:
    """Return the job's script. PBS sends no signal before the walltime ends. Therefore the script
    of a job with a walltime waits until the warning is due, and then creates the file `warned`
    itself.
    """
    words = {
        name: shlex.quote(text)
        for name, text in (
            ("folder", files.folder),
            ("agent", files.agent),
            ("python", job_options.python),
        )
    }
    length = time_limit(gang, queue)
    seconds = (
        None if length is None else max(1, int(length.total_seconds()) - job_options.warning_s)
    )
    return _SCRIPT.format(
        name=gang.name,
        shown=job_options.python.replace('"', ""),
        warning="" if seconds is None else _WARNING.format(seconds=seconds),
        hosts=HOSTS,
        wait=WAIT.format(process="$agents"),
        start=(_ALONE if gang.nodes == 1 else _EACH).format(**words),
        **words,
    )


def format_length(length: timedelta) -> str:
    seconds = int(length.total_seconds())
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def make_export(
    task: TaskSpec, offer: Offer | None, nodes: int, job_options: JobOptions, gpu_resource: str
) -> str:
    """Return the script for qsub. If `offer` is None, the script requests the accelerators, CPUs
    and memory named in the task.

    `pbsdsh` starts the work on the nodes, but does not pass environment variables on. Therefore the
    nodes read the environment variables from a file in the folder from which the job was submitted.
    """
    if offer is None:
        task = export.take_first_choice(task)
    name, secrets = _choose_name(task.name), f"{task.name}.secrets"
    chunks = f"{nodes}:{_chunk(task, offer, gpu_resource)}"
    program = _make_program(task, nodes, _count_gpus(task, offer), secrets)
    lines = [
        *export.make_header(
            "pbs",
            "#PBS",
            _list_options(task, offer, job_options, name, chunks),
            task,
            [*_list_own_notes(task, offer, name, gpu_resource), *export.list_notes(task, secrets)],
        ),
        'cd "$PBS_O_WORKDIR" || exit 1',
        'folder="$PBS_O_WORKDIR/.$PBS_JOBID"',
        'mkdir -m 700 "$folder" || exit 1',
        "trap 'rm -rf \"$folder\"' EXIT",
        "trap : TERM # PBS sends SIGTERM to the work too; this shell waits for it",
        f'cat > "$folder/work.sh" {export.here_document(program)}',
        f"hosts={HOSTS}",
        'MASTER_ADDR=$(head -n 1 "$PBS_NODEFILE")',
        *export.list_port_lines(_NUMBER),
        *_list_start(nodes),
    ]
    return "\n".join(lines) + "\n"


def _list_options(
    task: TaskSpec, offer: Offer | None, job_options: JobOptions, name: str, chunks: str
) -> Sequence[str]:
    return [
        "-S /bin/bash",
        *([shlex.join(job_options.options)] if job_options.options else []),
        f"-N {name}",
        f"-l select={chunks}",
        f"-l place=scatter{group_nodes(task.topology, job_options)}",
        *([f"-q {offer.zone}"] if offer is not None and offer.zone else []),
        *([f"-A {job_options.account}"] if job_options.account else []),
        *([f"-l walltime={format_length(task.limits.duration)}"] if task.limits.duration else []),
        "-r n",
        "-j oe",
    ]


def _make_program(task: TaskSpec, nodes: int, gpus: int, secrets: str) -> str:
    """Return the script that runs on each node."""
    lines = [
        'export MASTER_ADDR="$2" MASTER_PORT="$3" CAVVY_HOSTS="$4" NODE_RANK="${PBS_NODENUM:-0}"',
        f"export NPROC_PER_NODE={gpus or 1}",
        *export.list_exports(task, nodes),
        'cd "$(dirname "$1")" || exit 1',
        *([f". ./{secrets} || exit 1"] if task.secrets else []),
        *export.list_secret_lines(task, f"the file {secrets}"),
        f"CAVVY_WORK=$(cat {export.here_document(export.make_work(task))}\n)",
        f'exec bash -c "{export.STAY}; $CAVVY_WORK"',
    ]
    return "\n".join(lines) + "\n"


def _list_start(nodes: int) -> Sequence[str]:
    """Return the lines that start the script on the nodes and wait for its end."""
    if nodes == 1:
        return [f'bash "$folder/work.sh" {_ARGUMENTS}']
    return [
        f'cat > "$folder/rank.sh" {export.here_document(_RANK)}',
        _WAIT.format(arguments=_ARGUMENTS, nodes=nodes),
    ]


def _choose_name(name: str) -> str:
    """Return the name, changed if necessary to one that every version of PBS accepts: it begins
    with a letter."""
    return (name if name[0].isalpha() else f"job-{name}")[:_LONGEST_NAME].rstrip("-")


def _list_own_notes(
    task: TaskSpec, offer: Offer | None, name: str, gpu_resource: str
) -> Sequence[str]:
    notes = []
    if name != task.name:
        notes.append(f"PBS may not accept the name {task.name}; the job has the name {name}.")
    kinds = [each.name for each in task.resources.accelerators[:1] if each.name]
    if kinds and (offer is None or not gpu_resource):
        notes.append(
            f"Any model of GPU is accepted; add your cluster's resource for {kinds[0]} to select."
        )
    return notes


def _count_gpus(task: TaskSpec, offer: Offer | None) -> int:
    if offer is not None:
        return offer.accelerator_count
    need = task.resources
    return need.accelerators[0].count_min if need.accelerators else 0


def _chunk(task: TaskSpec, offer: Offer | None, gpu_resource: str) -> str:
    if offer is not None:
        return make_chunk(offer, gpu_resource)
    need = task.resources
    cpus = max(1, round(need.cpus_min or 1))
    memory = need.least_memory_mib(cpus)
    gpus = _count_gpus(task, offer)
    memory_part = f":mem={memory}mb" if memory else ""
    return f"ncpus={cpus}{memory_part}" + (f":ngpus={gpus}" if gpus else "")

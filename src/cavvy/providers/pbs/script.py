"""Builds the batch job of one gang: the options of qsub, and the script for qsub's input."""

import shlex
from collections.abc import Sequence
from datetime import timedelta

from cavvy.domain.offers import Offer
from cavvy.domain.tasks import TopologyNeed
from cavvy.providers.base import GangSpec
from cavvy.providers.batch.cluster import ClusterQueue, time_limit
from cavvy.providers.batch.shapes import gpu_of
from cavvy.providers.batch.system import WAIT, JobFiles, JobOptions

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

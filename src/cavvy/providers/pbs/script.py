"""The batch job of one gang: the options of qsub, and the script that it reads from its input."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from cavvy.providers.base import GangSpec
from cavvy.providers.batch.shapes import gpu_of
from cavvy.providers.pbs.cluster import PbsQueue
from cavvy.providers.pbs.commands import MARK

_PREPARATION = timedelta(hours=1)  # for folders and setups, beyond what the work is given
# As SlurmCommands's: `started` is made by one job only, `begun` and `end` are for jobs that the
# server has forgotten. PBS has no signal before the walltime is over, so the script watches the
# time itself.
_SCRIPT = """#!/bin/sh
# Cavvy: one agent on each node of {name}; see docs/guides/pbs.md.
umask 077
cd {folder} || exit 0
[ -e removing ] && exit 0
mkdir started || exit 0
exec >>batch.log 2>&1
[ -e job ] || {{ echo "$PBS_JOBID" > .job.$$ && mv .job.$$ job; }}
echo "$(date +%s) $(sort -u "$PBS_NODEFILE" | paste -s -d , -)" > .begun && mv .begun begun
if ! command -v {python} >/dev/null; then
    echo "$(hostname) has no {shown}; name a Python 3.8 or newer by the setting python" > refusal
    exit 78
fi
trap : TERM
{warning}{start} &
agents=$!
while :; do
    wait $agents
    code=$?
    kill -0 $agents 2>/dev/null || break # else it was a signal that ended the waiting
done
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PbsOptions:
    """What the settings say of every job."""

    account: str
    options: Sequence[str]
    python: str
    warning_s: int
    gpu_resource: str  # "" where the GPUs' kind is not asked for


def make_options(
    gang: GangSpec, queue: PbsQueue, mark: str, job_options: PbsOptions
) -> Sequence[str]:
    """What qsub is asked for. Cavvy's own words come last, so that more options cannot undo
    them.
    """
    offer = gang.offer
    chunk = f"{gang.nodes}:ncpus={max(1, int(offer.vcpus))}:mem={offer.memory_mib}mb"
    if offer.accelerator_count:
        chunk += f":ngpus={offer.accelerator_count}"
        if job_options.gpu_resource and gpu_of(offer):
            chunk += f":{job_options.gpu_resource}={gpu_of(offer)}"
    length = walltime(gang, queue)
    return [
        *(["-A", job_options.account] if job_options.account else []),
        *job_options.options,
        *("-q", queue.name),
        *("-N", gang.name),
        *("-l", f"select={chunk}"),
        *("-l", "place=scatter"),
        *(["-l", f"walltime={format_length(length)}"] if length else []),
        *("-r", "n"),
        *("-v", f"{MARK}={mark}"),
        *("-j", "oe"),
        *("-o", "/dev/null"),
        *("-m", "n"),
    ]


def make_script(
    gang: GangSpec, queue: PbsQueue, agent: str, folder: str, job_options: PbsOptions
) -> str:
    words = {
        name: shlex.quote(text)
        for name, text in (("folder", folder), ("agent", agent), ("python", job_options.python))
    }
    length = walltime(gang, queue)
    seconds = (
        None if length is None else max(1, int(length.total_seconds()) - job_options.warning_s)
    )
    return _SCRIPT.format(
        name=gang.name,
        shown=job_options.python.replace('"', ""),
        warning="" if seconds is None else _WARNING.format(seconds=seconds),
        start=(_ALONE if gang.nodes == 1 else _EACH).format(**words),
        **words,
    )


def walltime(gang: GangSpec, queue: PbsQueue) -> timedelta | None:
    """What the work needs at most, and an hour; the queue's longest where nobody knows."""
    if gang.longest is None:
        return queue.longest
    wanted = gang.longest + gang.grace + _PREPARATION
    return wanted if queue.longest is None else min(wanted, queue.longest)


def format_length(length: timedelta) -> str:
    seconds = int(length.total_seconds())
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"

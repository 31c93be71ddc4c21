"""The batch job of one gang: the options of sbatch, and the script that it reads from its input."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from cavvy.domain.tasks import VolumeKind
from cavvy.providers.base import GangSpec
from cavvy.providers.slurm.cluster import SlurmPartition, gres_of

# Only the script is signalled before the time limit (B:), since a step's signal would hit the work
# itself. The folder `started` is made by one job only: should a lost reply ever lead to a second
# job of this gang, or Slurm run this one again, it leaves at once. `begun` and `end` are for jobs
# that slurmctld has forgotten.
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
{boxed}srun --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1 --cpus-per-task={cpus} --kill-on-bad-exit=0 --wait=0 \\
    --mpi=none --unbuffered{container} sh -c 'exec "$0" -I -S "$1/start.py" "$1/agent" "$2" "$SLURM_PROCID"' \\
    {python} {agent} {folder} &
while :; do
    wait $!
    code=$?
    kill -0 $! 2>/dev/null || break # else it was a signal that ended the waiting
done
echo "$code $(date +%s)" > .end && mv .end end
exit $code
"""


_PREPARATION = timedelta(hours=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmOptions:
    """What the settings say of every job."""

    account: str
    qos: str
    options: Sequence[str]
    python: str
    warning_s: int


def make_options(
    gang: GangSpec, partition: SlurmPartition, comment: str, folder: str, job_options: SlurmOptions
) -> Sequence[str]:
    """What sbatch is asked for. Cavvy's own words come last, so that more options cannot undo
    them.
    """
    offer = gang.offer
    options = [
        f"--partition={partition.name}",
        *([f"--account={job_options.account}"] if job_options.account else []),
        *([f"--qos={job_options.qos}"] if job_options.qos else []),
        f"--time={format_length(_time_limit(gang, partition))}",
        *job_options.options,
        f"--job-name={gang.name}",
        f"--comment={comment}",
        f"--nodes={gang.nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={max(1, int(offer.vcpus))}",
        f"--mem={offer.memory_mib}M",
        f"--signal=B:USR1@{job_options.warning_s}",
        "--no-requeue",
        "--export=ALL",
        f"--chdir={folder}",
        f"--output={folder}/batch.log",
        "--open-mode=append",
    ]
    gres = gres_of(offer)
    return [*options, f"--gres={gres}"] if gres else options


def _time_limit(gang: GangSpec, partition: SlurmPartition) -> timedelta | None:
    """What the work needs at most, and an hour for folders and setups; the partition's longest
    where nobody knows.

    Never the partition's default, which is meant for those who forgot to ask and would cut long
    work into pieces.
    """
    if gang.longest is None:
        return partition.longest
    wanted = gang.longest + gang.grace + _PREPARATION
    return wanted if partition.longest is None else min(wanted, partition.longest)


def make_script(
    gang: GangSpec, agent: str, folder: str, python: str, *, pyxis: bool = False
) -> str:
    """With `pyxis`, the step itself runs in the gang's image, with the image's own Python."""
    container = list_container_options(gang, (agent, folder)) if pyxis and gang.image else []
    return _SCRIPT.format(
        bare="false" if container else "true",
        boxed="CAVVY_BOXED=1 " if container else "",
        container="".join(f" {shlex.quote(each)}" for each in container),
        name=gang.name,
        folder=shlex.quote(folder),
        agent=shlex.quote(agent),
        python=shlex.quote(python),
        shown=python.replace('"', ""),
        nodes=gang.nodes,
        cpus=max(1, int(gang.offer.vcpus)),
    )


def list_container_options(gang: GangSpec, folders: Sequence[str]) -> Sequence[str]:
    """Options of srun that Pyxis brings (github.com/NVIDIA/pyxis, "Usage")."""
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
    """Enroot wants a # between a registry and the rest."""
    first, slash, rest = image.partition("/")
    return (
        f"{first}#{rest}"
        if slash and ("." in first or ":" in first or first == "localhost")
        else image
    )


def format_length(length: timedelta | None) -> str:
    """As SlurmCommands reads it, in whole minutes."""
    if length is None:
        return "UNLIMITED"
    minutes = max(1, length // timedelta(minutes=1))
    return f"{minutes // 1440}-{minutes // 60 % 24:02}:{minutes % 60:02}:00"

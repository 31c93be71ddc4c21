"""Slurm's commands as functions, and what their complaints mean."""

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from cavvy.providers.base import NoCapacity, ProviderError, Refused, TryAgain
from cavvy.providers.batch.hostlist import expand
from cavvy.providers.batch.login_session import CommandResult, LoginSession
from cavvy.providers.batch.rows import BatchJobRow, BatchPhase, SubmissionUnsure

TOOLS = ("sbatch", "squeue", "scancel", "scontrol", "sacct", "sacctmgr")
# Complaints of sbatch, by what the caller does next; what none of them fits is for a person to
# read.
_LATER = re.compile(
    r"unable to contact|socket timed out|connection refused|connect failure|zero "
    r"bytes|communication|backup controller|"
    r"temporarily|timed out|slurm_receive_msg|no answer within|send/recv",
    re.IGNORECASE,
)
_SURELY_NOT = re.compile(
    r"unable to contact|connection refused|connect failure", re.IGNORECASE
)  # never arrived there
_ELSEWHERE = re.compile(
    r"node configuration is not available|nodes are busy|more processors|memory specification|"
    r"nodes required for job are down|invalid partition|partition.*(down|drain|inactive)|invalid "
    r"generic resource|"
    r"node count specification",
    re.IGNORECASE,
)
_BREAK = "\x1f"
_EPOCH = {"SLURM_TIME_FORMAT": "%s"}


_WAITS = frozenset(
    {"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
)
_WORKS = frozenset(
    {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "STAGE_OUT"}
)
# How jobs end, in words for users. "cancelled" is by somebody else: what we cancel is marked as
# removed.
_ENDS = {
    "COMPLETED": "its agents left",
    "FAILED": "its agents broke",
    "CANCELLED": "it was cancelled in Slurm, not by Cavvy",
    "PREEMPTED": "Slurm gave its nodes to a job that goes first",
    "TIMEOUT": "it reached Slurm's time limit",
    "DEADLINE": "it reached Slurm's deadline",
    "NODE_FAIL": "a node failed",
    "BOOT_FAIL": "a node did not boot",
    "OUT_OF_MEMORY": "it used more memory than it asked for",
    "REVOKED": "Slurm gave it to another cluster",
}
_TAKEN = frozenset({"PREEMPTED", "TIMEOUT"})


class SlurmCommands:
    """The commands on one login node. Every method raises TryAgain and Refused."""

    def __init__(self, login_session: LoginSession) -> None:
        self._login_session = login_session

    async def submit(self, options: Sequence[str], script: str) -> str:
        """Submit; the job's id. Raises SubmissionUnsure, NoCapacity too."""
        done = await self._login_session.run(
            ["sbatch", "--parsable", *options], script.encode(), timeout_s=45
        )
        if done.code == 0 and (found := re.match(r"(\d+)", done.out.strip())):
            return found[1]
        raise sort_complaint(done)

    async def jobs(self, uid: int, mark: str) -> Sequence[BatchJobRow]:
        """The jobs with this comment, those that ended a while ago included."""
        fields = _BREAK.join(("%i", "%j", "%T", "%r", "%N", "%S", "%e", "%k"))
        argv = ["squeue", "--noheader", "--states=all", f"--user={uid}", f"--format={fields}"]
        out = await self._ask(argv, env=_EPOCH)
        rows = [parts for line in out.splitlines() if len(parts := line.split(_BREAK)) == 8]
        return [read_row(parts) for parts in rows if parts[7].strip() == mark]

    async def cancel(self, jobs: Sequence[str]) -> None:
        """Cancel jobs; those that are over already are no error."""
        if jobs:
            done = await self._login_session.run(["scancel", *jobs])
            if done.code != 0 and "already" not in done.said and "Invalid job id" not in done.said:
                raise TryAgain(f"scancel: {done.said}")

    async def accounted(self, job: str) -> BatchJobRow | None:
        """What the accounting remembers of a job that slurmctld forgot; None where it does not
        know it either.
        """
        if "sacct" not in (await self._login_session.hello()).tools:
            return None
        fields = "JobIDRaw,JobName,State,Reason,NodeList,Start,End,Comment"
        argv = ["sacct", "-X", "-n", "-P", "--delimiter", _BREAK, "-j", job, "-o", fields]
        done = await self._login_session.run(argv, env=_EPOCH)
        rows = [parts for line in done.out.splitlines() if len(parts := line.split(_BREAK)) == 8]
        return read_row(rows[0]) if done.code == 0 and rows else None

    async def show(self, *what: str) -> Sequence[Mapping[str, str]]:
        """`scontrol show ... --oneliner`, one table a line."""
        return [
            parse_pairs(line)
            for line in (await self._ask(["scontrol", "--oneliner", *what])).splitlines()
        ]

    async def config(self) -> Mapping[str, str]:
        """slurmctld's configuration."""
        found = {}
        for line in (await self._ask(["scontrol", "show", "config"])).splitlines():
            name, equals, value = line.partition("=")
            if equals:
                found[name.strip()] = value.strip()
        return found

    async def limits(self, user: str) -> Sequence[tuple[str, str]]:
        """The limits of the user's associations and their qualities of service; () without
        accounting.
        """
        told = []
        assoc = [
            "sacctmgr",
            "-n",
            "-P",
            "show",
            "assoc",
            f"user={user}",
            "format=Account,QOS,GrpTRES,MaxTRES,MaxJobs",
        ]
        for line in (await self._login_session.run(assoc)).out.splitlines():
            account, qualities, *limits = line.split("|")
            told.append(
                (
                    f"account {account}",
                    _limits(("group", "per job", "jobs"), limits) + f"; QOS {qualities}",
                )
            )
        qos = [
            "sacctmgr",
            "-n",
            "-P",
            "show",
            "qos",
            "format=Name,GrpTRES,MaxTRESPU,MaxJobsPU,MaxWall",
        ]
        for line in (await self._login_session.run(qos)).out.splitlines():
            name, *limits = line.split("|")
            if any(limits):
                told.append(
                    (f"QOS {name}", _limits(("group", "per user", "jobs per user", "time"), limits))
                )
        return told

    async def _ask(self, argv: Sequence[str], env: Mapping[str, str] | None = None) -> str:
        done = await self._login_session.run(argv, env=env)
        if done.code == 0:
            return done.out
        if _LATER.search(done.said):
            raise TryAgain(f"Slurm does not answer: {done.said}")
        raise Refused(f"{argv[0]}: {done.said}")


def sort_complaint(done: CommandResult) -> ProviderError:
    """What a refused or lost submission is to its caller."""
    said = done.said.replace("sbatch: error: ", "")
    if done.code is None or (_LATER.search(said) and not _SURELY_NOT.search(said)):
        return SubmissionUnsure(f"sbatch: {said}")
    if _LATER.search(said):
        return TryAgain(f"sbatch: {said}")
    return (
        NoCapacity(f"Slurm cannot place this: {said}")
        if _ELSEWHERE.search(said)
        else Refused(f"sbatch: {said}")
    )


def parse_pairs(line: str) -> dict[str, str]:
    """`A=1 B=two words C=3` as a table: a name is a word with a `=` behind it."""
    parts = re.split(r"(?:^|\s)([A-Za-z_/:]+)=", line)
    return {name: value.strip() for name, value in zip(parts[1::2], parts[2::2], strict=True)}


def read_row(parts: Sequence[str]) -> BatchJobRow:
    """A line of squeue or sacct: id, name, state, reason, nodes, start, end, comment."""
    job, name, state, reason, nodes, start, end, _ = (part.strip() for part in parts)
    state = state.split()[0] if state else ""  # "CANCELLED by 1000"
    phase = BatchPhase.OVER
    if state in _WAITS:
        phase, told = (
            BatchPhase.WAITS,
            f"Slurm: {reason}" if reason not in ("", "None") else "waits in Slurm's queue",
        )
    elif state == "CONFIGURING":
        phase, told = BatchPhase.BEGINS, "Slurm makes the nodes ready"
    elif state in _WORKS:
        phase, told = BatchPhase.WORKS, "" if state == "RUNNING" else f"Slurm: {state.lower()}"
    else:
        told = _ENDS.get(state, f"Slurm: {state.lower()}")
    return BatchJobRow(
        id=job,
        name=name,
        phase=phase,
        reason=told,
        hosts=() if nodes.startswith("None") else tuple(expand(nodes)),
        start=_time(start),
        end=_time(end),
        taken=state in _TAKEN,
        broke=state == "FAILED",
    )


def _time(text: str) -> datetime | None:
    return datetime.fromtimestamp(int(text), UTC) if text.isdigit() and int(text) else None


def _limits(names: Sequence[str], values: Sequence[str]) -> str:
    given = [f"{name} {value}" for name, value in zip(names, values, strict=False) if value]
    return ", ".join(given) or "no limits"

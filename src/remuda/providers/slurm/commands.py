"""Slurm's commands as functions, and what their complaints mean."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from remuda.providers.base import NoCapacity, ProviderError, Refused, TryAgain
from remuda.providers.batch.seat import Done, Seat

TOOLS = ("sbatch", "squeue", "scancel", "scontrol", "sacct", "sacctmgr")
# Complaints of sbatch, by what the caller does next; what none of them fits is for a person to read.
_LATER = re.compile(
    r"unable to contact|socket timed out|connection refused|connect failure|zero bytes|communication|backup controller|"
    r"temporarily|timed out|slurm_receive_msg|no answer within|send/recv",
    re.IGNORECASE,
)
_SURELY_NOT = re.compile(r"unable to contact|connection refused|connect failure", re.IGNORECASE)  # never arrived there
_ELSEWHERE = re.compile(
    r"node configuration is not available|nodes are busy|more processors|memory specification|"
    r"nodes required for job are down|invalid partition|partition.*(down|drain|inactive)|invalid generic resource|"
    r"node count specification",
    re.IGNORECASE,
)
_BREAK = "\x1f"
_EPOCH = {"SLURM_TIME_FORMAT": "%s"}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRow:
    """One job as slurmctld knows it. `start` and `end` are expected times where they lie ahead."""

    id: str
    name: str
    state: str
    reason: str
    nodes: str
    start: datetime | None
    end: datetime | None
    comment: str


class Unsure(TryAgain):
    """The job may have been submitted."""


class Slurm:
    """The commands on one login node. Every method raises TryAgain and Refused."""

    def __init__(self, seat: Seat) -> None:
        self._seat = seat

    async def submit(self, options: Sequence[str], script: str) -> str:
        """Submit; the job's id. Raises Unsure, NoCapacity too."""
        done = await self._seat.run(["sbatch", "--parsable", *options], script.encode(), timeout_s=45)
        if done.code == 0 and (found := re.match(r"(\d+)", done.out.strip())):
            return found[1]
        raise _sorted(done)

    async def jobs(self, uid: int, comment: str) -> Sequence[JobRow]:
        """The jobs with this comment, those that ended a while ago included."""
        fields = _BREAK.join(("%i", "%j", "%T", "%r", "%N", "%S", "%e", "%k"))
        argv = ["squeue", "--noheader", "--states=all", f"--user={uid}", f"--format={fields}"]
        out = await self._ask(argv, env=_EPOCH)
        rows = [parts for line in out.splitlines() if len(parts := line.split(_BREAK)) == 8]
        return [_row(parts) for parts in rows if parts[7].strip() == comment]

    async def cancel(self, jobs: Sequence[str]) -> None:
        """Cancel jobs; those that are over already are no error."""
        if jobs:
            done = await self._seat.run(["scancel", *jobs])
            if done.code != 0 and "already" not in done.said and "Invalid job id" not in done.said:
                raise TryAgain(f"scancel: {done.said}")

    async def accounted(self, job: str) -> JobRow | None:
        """What the accounting remembers of a job that slurmctld forgot; None where it does not know it either."""
        fields = "JobIDRaw,JobName,State,Reason,NodeList,Start,End,Comment"
        argv = ["sacct", "-X", "-n", "-P", "--delimiter", _BREAK, "-j", job, "-o", fields]
        done = await self._seat.run(argv, env=_EPOCH)
        rows = [parts for line in done.out.splitlines() if len(parts := line.split(_BREAK)) == 8]
        return _row(rows[0]) if done.code == 0 and rows else None

    async def show(self, *what: str) -> Sequence[Mapping[str, str]]:
        """`scontrol show ... --oneliner`, one table a line."""
        return [parse_pairs(line) for line in (await self._ask(["scontrol", "--oneliner", *what])).splitlines()]

    async def config(self) -> Mapping[str, str]:
        """slurmctld's configuration."""
        found = {}
        for line in (await self._ask(["scontrol", "show", "config"])).splitlines():
            name, equals, value = line.partition("=")
            if equals:
                found[name.strip()] = value.strip()
        return found

    async def limits(self, user: str) -> Sequence[tuple[str, str]]:
        """The limits of the user's associations and their qualities of service; () without accounting."""
        told = []
        assoc = ["sacctmgr", "-n", "-P", "show", "assoc", f"user={user}", "format=Account,QOS,GrpTRES,MaxTRES,MaxJobs"]
        for line in (await self._seat.run(assoc)).out.splitlines():
            account, qualities, *limits = line.split("|")
            told.append((f"account {account}", _limits(("group", "per job", "jobs"), limits) + f"; QOS {qualities}"))
        qos = ["sacctmgr", "-n", "-P", "show", "qos", "format=Name,GrpTRES,MaxTRESPU,MaxJobsPU,MaxWall"]
        for line in (await self._seat.run(qos)).out.splitlines():
            name, *limits = line.split("|")
            if any(limits):
                told.append((f"QOS {name}", _limits(("group", "per user", "jobs per user", "time"), limits)))
        return told

    async def _ask(self, argv: Sequence[str], env: Mapping[str, str] | None = None) -> str:
        done = await self._seat.run(argv, env=env)
        if done.code == 0:
            return done.out
        if _LATER.search(done.said):
            raise TryAgain(f"Slurm does not answer: {done.said}")
        raise Refused(f"{argv[0]}: {done.said}")


def parse_pairs(line: str) -> dict[str, str]:
    """`A=1 B=two words C=3` as a table: a name is a word with a `=` behind it."""
    parts = re.split(r"(?:^|\s)([A-Za-z_/:]+)=", line)
    return {name: value.strip() for name, value in zip(parts[1::2], parts[2::2], strict=True)}


def _sorted(done: Done) -> ProviderError:
    said = done.said.replace("sbatch: error: ", "")
    if "FileNotFoundError" in said:
        return Refused(f"there is no sbatch on the login node: {said}")
    if done.code is None or (_LATER.search(said) and not _SURELY_NOT.search(said)):
        return Unsure(f"sbatch: {said}")
    if _LATER.search(said):
        return TryAgain(f"sbatch: {said}")
    return NoCapacity(f"Slurm cannot place this: {said}") if _ELSEWHERE.search(said) else Refused(f"sbatch: {said}")


def _row(parts: Sequence[str]) -> JobRow:
    job, name, state, reason, nodes, start, end, comment = (part.strip() for part in parts)
    return JobRow(
        id=job,
        name=name,
        state=state.split()[0] if state else "",  # "CANCELLED by 1000"
        reason="" if reason == "None" else reason,
        nodes="" if nodes.startswith("None") else nodes,
        start=_time(start),
        end=_time(end),
        comment=comment,
    )


def _time(text: str) -> datetime | None:
    return datetime.fromtimestamp(int(text), UTC) if text.isdigit() and int(text) else None


def _limits(names: Sequence[str], values: Sequence[str]) -> str:
    given = [f"{name} {value}" for name, value in zip(names, values, strict=False) if value]
    return ", ".join(given) or "no limits"

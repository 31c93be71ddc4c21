"""PBS's commands as functions, and what their complaints mean."""

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from cavvy.providers.base import NoCapacity, ProviderError, Refused, TryAgain
from cavvy.providers.batch.login_session import CommandResult, LoginSession
from cavvy.providers.batch.rows import BatchJobRow, BatchPhase, SubmissionUnsure

TOOLS = ("qsub", "qstat", "qselect", "qdel", "pbsnodes", "pbsdsh")
MARK = "CAVVY_MARK"  # the variable by which our jobs are known
_LATER = re.compile(
    r"cannot connect|connection refused|timed out|no answer within|communication|premature end|end "
    r"of file|"
    r"could not connect|try again|server shutting down|busy",
    re.IGNORECASE,
)
_SURELY_NOT = re.compile(
    r"cannot connect|could not connect|connection refused", re.IGNORECASE
)  # never arrived there
_ELSEWHERE = re.compile(
    r"unknown queue|queue is not enabled|exceeds.*(limit|maximum)|max_run|insufficient|unknown "
    r"resource|illegal value",
    re.IGNORECASE,
)
_GONE = re.compile(r"unknown job id|has finished|request invalid for state", re.IGNORECASE)
_WALLTIME = -29  # JOB_EXEC_KILL_WALLTIME of PBS's job.h
_MEMORY = (-26, -27)  # JOB_EXEC_KILL_VMEM, JOB_EXEC_KILL_MEM
_SIGNALLED = 256  # and the number of the signal: the job's script was killed
_UTC = {"TZ": "UTC"}  # qstat shows times as the client's zone has them


class PbsCommands:
    """The commands on one login node. Every method raises TryAgain and Refused."""

    def __init__(self, login_session: LoginSession) -> None:
        self._login_session = login_session
        self._user = ""

    async def submit(self, options: Sequence[str], script: str) -> str:
        """Submit; the job's id. Raises SubmissionUnsure, NoCapacity too."""
        done = await self._login_session.run(["qsub", *options], script.encode(), timeout_s=45)
        if done.code == 0 and (found := re.match(r"\d+\S*", done.out.strip())):
            return found[0]
        raise sort_complaint(done)

    async def jobs(self, uid: int, mark: str) -> Sequence[BatchJobRow]:
        """The jobs with this mark, ended ones included where the server keeps a history."""
        if not self._user:
            self._user = (await self._ask(["id", "-un"])).strip()
        ids = (await self._ask_with_history("qselect", "-u", self._user)).split()
        if not ids:
            return []
        told = await self._ask_with_history("qstat", "-f", "-F", "json", *ids, gone=True)
        jobs = _decode(told).get("Jobs", {})
        return [
            read_row(job, facts)
            for job, facts in jobs.items()
            if _variables(facts).get(MARK) == mark
        ]

    async def cancel(self, jobs: Sequence[str]) -> None:
        """Delete jobs; those that are over already are no error."""
        for job in jobs:
            done = await self._login_session.run(["qdel", job])
            if done.code != 0 and not _GONE.search(done.said):
                raise TryAgain(f"qdel: {done.said}")

    async def accounted(self, job: str) -> BatchJobRow | None:
        """PBS's accounting is a file of its server; what it forgot is forgotten."""
        return None

    async def server(self) -> tuple[str, Mapping[str, Any]]:
        """The server's name and its attributes."""
        found = _decode(await self._ask(["qstat", "-B", "-f", "-F", "json"])).get("Server", {})
        for name, facts in found.items():
            return name, facts
        raise TryAgain("PBS does not say which server it is")

    async def queues(self) -> Mapping[str, Mapping[str, Any]]:
        found: dict[str, dict[str, Any]] = _decode(
            await self._ask(["qstat", "-Q", "-f", "-F", "json"])
        ).get("Queue", {})
        return found

    async def nodes(self) -> Mapping[str, Mapping[str, Any]]:
        found: dict[str, dict[str, Any]] = _decode(
            await self._ask(["pbsnodes", "-a", "-F", "json"])
        ).get("nodes", {})
        return found

    async def _ask_with_history(self, command: str, *arguments: str, gone: bool = False) -> str:
        done = await self._login_session.run([command, "-x", *arguments], env=_UTC)
        if done.code != 0 and "history" in done.said.lower():
            done = await self._login_session.run([command, *arguments], env=_UTC)
        if done.code == 0 or (gone and done.out.strip() and _GONE.search(done.err)):
            return done.out
        raise _failed(command, done)

    async def _ask(self, argv: Sequence[str]) -> str:
        done = await self._login_session.run(argv, env=_UTC)
        if done.code == 0:
            return done.out
        raise _failed(argv[0], done)


def _failed(command: str, done: CommandResult) -> ProviderError:
    if done.code is None or _LATER.search(done.said):
        return TryAgain(f"PBS does not answer: {done.said}")
    return Refused(f"{command}: {done.said}")


def sort_complaint(done: CommandResult) -> ProviderError:
    """What a refused or lost submission is to its caller."""
    said = done.said.replace("qsub: ", "")
    if done.code is None or (_LATER.search(said) and not _SURELY_NOT.search(said)):
        return SubmissionUnsure(f"qsub: {said}")
    if _LATER.search(said):
        return TryAgain(f"qsub: {said}")
    return (
        NoCapacity(f"PBS cannot place this: {said}")
        if _ELSEWHERE.search(said)
        else Refused(f"qsub: {said}")
    )


def read_row(job: str, facts: Mapping[str, Any]) -> BatchJobRow:
    """One job of `qstat -f -F json`."""
    state, code = str(facts.get("job_state", "")), facts.get("Exit_status")
    comment = " ".join(str(facts.get("comment", "")).split())
    hosts = tuple(
        part.partition("/")[0] for part in str(facts.get("exec_host", "")).split("+") if part
    )
    start, end = _time(facts.get("stime")), None
    if state in ("Q", "W", "T", "H"):
        waits = "PBS: " + (comment.removeprefix("Not Running: ") or "queued")
        phase, told = BatchPhase.WAITS, "PBS holds it" if state == "H" else waits
        start = _time(facts.get("estimated", {}).get("start_time"))
    elif state in ("R", "E", "S", "U", "B"):
        phase, told = BatchPhase.WORKS, "PBS suspended it" if state in ("S", "U") else ""
    else:
        phase, told, end = BatchPhase.OVER, _end(code, comment), _read_end(facts)
    return BatchJobRow(
        id=job,
        name=str(facts.get("Job_Name", "")),
        phase=phase,
        reason=told,
        hosts=hosts,
        start=start,
        end=end,
        taken=code == _WALLTIME,
        broke=isinstance(code, int) and 0 < code < _SIGNALLED,
    )


def _read_end(facts: Mapping[str, Any]) -> datetime | None:
    stamp = _time(facts.get("obittime")) or _stamp(facts.get("history_timestamp"))
    return stamp or _time(facts.get("mtime"))


def _end(code: object, comment: str) -> str:
    if code == 0:
        return "its agents left"
    if code == _WALLTIME:
        return "it reached its walltime"
    if code in _MEMORY:
        return "it used more memory than it asked for"
    if isinstance(code, int) and 0 < code < _SIGNALLED:
        return "its agents broke"
    return f"PBS ended it: {comment}" if comment else "PBS ended it"


def _variables(facts: Mapping[str, Any]) -> Mapping[str, Any]:
    found = facts.get("Variable_List", {})
    return found if isinstance(found, dict) else {}


def _decode(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise TryAgain(f"PBS's answer cannot be read: {error}") from error


def _time(text: object) -> datetime | None:
    """`Fri Nov 20 07:13:11 2026`, in UTC as we asked; some fields are seconds since the epoch."""
    if isinstance(text, int) or (isinstance(text, str) and text.isdigit()):
        return _stamp(int(text))
    try:
        return datetime.strptime(str(text), "%a %b %d %H:%M:%S %Y").replace(tzinfo=UTC)
    except ValueError:
        return None


def _stamp(seconds: object) -> datetime | None:
    return (
        datetime.fromtimestamp(seconds, UTC) if isinstance(seconds, int) and seconds > 0 else None
    )

"""Runs PBS's commands and parses their output: queues, nodes, and states of jobs."""

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from cavvy.domain.offers import Offer
from cavvy.domain.tasks import Scalar, TaskSpec, TopologyNeed
from cavvy.domain.values import replace
from cavvy.providers.base import GangSpec, Manifest, ProviderContext, TryAgain
from cavvy.providers.batch.commands import BatchCommands, BatchDialect, BatchJobRow, BatchPhase
from cavvy.providers.batch.login_session import HelperHello, LoginSession, read_where
from cavvy.providers.batch.provider import BatchProvider
from cavvy.providers.batch.shapes import NodeShape
from cavvy.providers.batch.system import (
    BatchCluster,
    ClusterNode,
    ClusterQueue,
    JobFiles,
    read_job_options,
)
from cavvy.providers.pbs.script import MARK, make_export, make_options, make_script

_TOOLS = ("qsub", "qstat", "qselect", "qdel", "pbsnodes", "pbsdsh")
DIALECT = BatchDialect(
    title="PBS",
    submit=("qsub",),
    cancel="qdel",
    job_id=r"\d+\S*",
    prefix="qsub: ",
    later="cannot connect|connection refused|timed out|no answer within|communication|"
    "premature end|end of file|could not connect|try again|server shutting down|busy",
    not_sent="cannot connect|could not connect|connection refused",
    elsewhere="unknown queue|queue is not enabled|exceeds.*(limit|maximum)|max_run|insufficient|"
    "unknown resource|illegal value",
    gone="unknown job id|has finished|request invalid for state",
    environ={"TZ": "UTC"},  # makes qstat print times in UTC
)
_DELETED = "91"  # JOB_SUBSTATE_TERMINATED in PBS's job.h: qdel ended the job
_WALLTIME = -29  # JOB_EXEC_KILL_WALLTIME in PBS's job.h
_ENDS: dict[object, str] = {
    0: "the agents exited",
    _WALLTIME: "the job reached its walltime",
    **dict.fromkeys(  # JOB_EXEC_KILL_VMEM, JOB_EXEC_KILL_MEM
        (-26, -27), "the job used more memory than requested"
    ),
}
# if a signal killed a script, PBS reports its exit status as 256 plus the signal's number
_SIGNALLED = 256
_SIZES_KIB = {"b": 1 / 1024, "kb": 1, "mb": 1024, "gb": 1024**2, "tb": 1024**3}
_USABLE = {"free", "job-busy", "job-exclusive", "busy", "resv-exclusive"}
Facts = Mapping[str, Any]


def make_provider(manifest: Manifest, context: ProviderContext) -> BatchProvider:
    """Create the provider of one cluster."""
    settings = context.settings
    where = read_where(settings, _TOOLS)
    return BatchProvider(manifest, context, where, lambda login: PbsSystem(settings, login))


class PbsSystem:
    """Implements `BatchSystem` for PBS."""

    title, queues = "PBS", "queues"

    def __init__(self, settings: Mapping[str, Scalar], login_session: LoginSession) -> None:
        self.commands = BatchCommands(login_session, DIALECT)
        self.job_options = read_job_options(settings, "qsub_options")
        self._settings = settings
        self._gpu, self._gpu_resource = self._text("gpu"), self._text("gpu_resource")
        self._asked_resource = "" if self._gpu else self._gpu_resource
        self._spot = [name.strip() for name in self._text("spot_queues").split(",")]
        self._user = ""

    def object_to_topology(self, need: TopologyNeed) -> str:
        return "PBS cannot place slices; delete `slice`" if need.slice is not None else ""

    async def read_cluster(self) -> BatchCluster:
        servers = await self._read("Server", "qstat", "-B", "-f")
        if not servers:
            raise TryAgain("PBS did not report the name of its server")
        return read_cluster(
            next(iter(servers.items())),
            await self._read("Queue", "qstat", "-Q", "-f"),
            await self._read("nodes", "pbsnodes", "-a"),
            gpu=self._gpu,
            gpu_resource=self._gpu_resource,
            spot=self._spot,
            reclaim_s=float(self._settings.get("kill_delay_s", 10)),
        )

    async def jobs(self, uid: int, mark: str) -> Sequence[BatchJobRow]:
        if not self._user:
            self._user = (await self.commands.ask(["id", "-un"])).strip()
        ids = (await self._ask_with_history("qselect", "-u", self._user)).split()
        if not ids:
            return []
        out = await self._ask_with_history("qstat", "-f", "-F", "json", *ids, gone=True)
        jobs = _decode(out).get("Jobs", {})
        return [
            read_row(job, facts, spot=facts.get("queue") in self._spot)
            for job, facts in jobs.items()
            if _variables(facts).get(MARK) == mark
        ]

    async def accounted(self, job: str) -> BatchJobRow | None:
        return None  # PBS's accounting is a file on its server, which the login node cannot read

    async def explain_accounts(self, user: str, hello: HelperHello) -> Sequence[tuple[str, str]]:
        return ()

    def make_job(
        self, gang: GangSpec, queue: ClusterQueue, files: JobFiles
    ) -> tuple[Sequence[str], str]:
        options = make_options(gang, queue, files.mark, self.job_options, self._asked_resource)
        return options, make_script(gang, queue, files, self.job_options)

    def export(self, task: TaskSpec, offer: Offer | None, nodes: int) -> str:
        return make_export(task, offer, nodes, self.job_options, self._asked_resource)

    async def _read(self, kind: str, *argv: str) -> Mapping[str, Facts]:
        """Return all objects of one kind, such as queues, with their attributes, by name."""
        out = await self.commands.ask([*argv, "-F", "json"])
        found: Mapping[str, Facts] = _decode(out).get(kind, {})
        return found

    async def _ask_with_history(self, command: str, *arguments: str, gone: bool = False) -> str:
        """Run a command that queries jobs. Ended jobs are included if the PBS server still has
        records of these jobs.
        """
        done = await self.commands.run([command, "-x", *arguments])
        if done.code != 0 and "history" in done.said.lower():
            done = await self.commands.run([command, *arguments])
        over = gone and done.out.strip() and re.search(DIALECT.gone, done.err, re.IGNORECASE)
        if done.code == 0 or over:
            return done.out
        raise self.commands.explain(command, done)

    def _text(self, name: str) -> str:
        return str(self._settings.get(name, ""))


def read_cluster(
    server: tuple[str, Facts],
    queues: Mapping[str, Facts],
    nodes: Mapping[str, Facts],
    *,
    gpu: str = "",
    gpu_resource: str = "",
    spot: Sequence[str] = (),
    reclaim_s: float = 0,
) -> BatchCluster:
    """Return the cluster as PBS describes it, with the queues that accept and start jobs. If `gpu`
    is "", Cavvy reads the model of a node's GPUs from the PBS resource that `gpu_resource` names.

    A queue uses the nodes that are assigned to it. A queue without assigned nodes uses all nodes
    that are assigned to no queue.
    """
    name, facts = server
    read = {node: _read_node(node, row, gpu, gpu_resource) for node, row in nodes.items()}
    members: dict[str, list[ClusterNode]] = {}
    for node, row in nodes.items():
        members.setdefault(str(row.get("queue", "")), []).append(read[node])
    usable = [
        ClusterQueue(
            name=queue,
            nodes=members.get(queue) or members.get("", []),
            longest=_length(row.get("resources_max", {}).get("walltime")),
            taken=queue in spot,
            reclaim_s=reclaim_s,
        )
        for queue, row in queues.items()
        if _is_usable(row)
    ]
    return BatchCluster(
        name=name.split(".")[0],
        version=str(facts.get("pbs_version", "")),
        queues=usable,
        nodes=list(read.values()),
    )


def _is_usable(queue: Facts) -> bool:
    """Return True if the queue accepts and starts jobs and is an execution queue (not a routing
    queue).
    """
    runs = str(queue.get("queue_type", "")).lower().startswith("e")
    return runs and str(queue.get("enabled")) == str(queue.get("started")) == "True"


def read_row(job: str, facts: Facts, *, spot: bool = False) -> BatchJobRow:
    """Parse one job from `qstat -f -F json`. If `spot` is True, a deleted job counts as preempted,
    because PBS itself may delete the jobs of a spot queue.
    """
    code = facts.get("Exit_status")
    deleted = _text(facts, "substate") == _DELETED
    row = BatchJobRow(
        id=job,
        name=_text(facts, "Job_Name"),
        phase=BatchPhase.OVER,
        hosts=_list_hosts(facts),
        start=_time(facts.get("stime")),
        taken=code == _WALLTIME or (deleted and spot),
        cancelled=deleted and not spot,
        broke=isinstance(code, int) and 0 < code < _SIGNALLED,
    )
    comment, state = " ".join(_text(facts, "comment").split()), _text(facts, "job_state")
    if state in ("Q", "W", "T", "H"):
        waits = "PBS: " + (comment.removeprefix("Not Running: ") or "queued")
        start = _time(facts.get("estimated", {}).get("start_time"))
        reason = _explain_hold(job, facts, comment) if state == "H" else waits
        return replace(row, phase=BatchPhase.WAITS, reason=reason, start=start)
    if state in ("R", "E", "B", "S", "U"):
        reason = "PBS suspended it" if state in ("S", "U") else ""
        return replace(row, phase=BatchPhase.WORKS, reason=reason)
    return replace(row, reason=_explain_end(row, code, comment), end=_find_end(facts))


def _explain_hold(job: str, facts: Facts, comment: str) -> str:
    """Return why PBS holds a job, and how to release the job. PBS itself holds a job, for example,
    whose start has failed too often.
    """
    kinds = _text(facts, "Hold_Types").strip("n")  # "n" means no hold
    release = f"qrls -h {kinds} {job}" if kinds else f"qrls {job}"
    why = f": {comment}" if comment else ""
    return f"PBS holds it{why}; PBS does not start it before someone runs: {release}"


def _explain_end(row: BatchJobRow, code: object, comment: str) -> str:
    if row.cancelled:
        return "the job was deleted in PBS, not by Cavvy"
    if row.broke:
        return "the agents failed"
    return _ENDS.get(code, f"PBS ended the job: {comment}" if comment else "PBS ended it")


def _text(facts: Facts, name: str) -> str:
    return str(facts.get(name, ""))


def _list_hosts(facts: Facts) -> tuple[str, ...]:
    """Return the hosts in a list such as `n1/0*8+n2/1*8`."""
    parts = _text(facts, "exec_host").split("+")
    return tuple(part.partition("/")[0] for part in parts if part)


def _find_end(facts: Facts) -> datetime | None:
    stamps = (_time(facts.get(name)) for name in ("obittime", "history_timestamp", "mtime"))
    return next((stamp for stamp in stamps if stamp), None)


def read_size(text: object) -> int:
    """Parse a size such as `528000000kb` to whole MiB; return 0 if the text is not a size."""
    found = re.fullmatch(r"(\d+)\s*([kmgt]?b)?", str(text or "").lower())
    return int(int(found[1]) * _SIZES_KIB[found[2] or "b"] / 1024) if found else 0


def _read_node(name: str, row: Facts, gpu: str, gpu_resource: str) -> ClusterNode:
    has, used = row.get("resources_available", {}), row.get("resources_assigned", {})
    gpus = _whole(has.get("ngpus"))
    kind = (gpu or str(has.get(gpu_resource, ""))) if gpus else ""
    total = NodeShape(
        cpus=_whole(has.get("ncpus")), memory_mib=read_size(has.get("mem")), gpus=gpus, gpu=kind
    )
    if not set(str(row.get("state", "")).split(",")) <= _USABLE:
        return ClusterNode(name=name, shape=total, up=False)
    free = NodeShape(
        cpus=total.cpus - _whole(used.get("ncpus")),
        memory_mib=total.memory_mib - read_size(used.get("mem")),
        gpus=gpus - _whole(used.get("ngpus")),
        gpu=kind,
    )
    return ClusterNode(name=name, shape=total, up=True, free=free)


def _length(text: object) -> timedelta | None:
    """Parse `48:00:00`, or a number of seconds; return None for any other text."""
    parts = [int(part) for part in str(text or "").split(":") if part.isdigit()]
    if not parts:
        return None
    return timedelta(seconds=sum(part * 60**power for power, part in enumerate(reversed(parts))))


def _whole(value: object) -> int:
    return int(str(value)) if str(value or "").isdigit() else 0


def _variables(facts: Facts) -> Facts:
    found = facts.get("Variable_List", {})
    return found if isinstance(found, dict) else {}


def _decode(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise TryAgain(f"PBS's output cannot be parsed: {error}") from error


def _time(text: object) -> datetime | None:
    """Parse a time such as `Fri Nov 20 07:13:11 2026` (UTC, as requested) or seconds since the
    epoch; return None for any other text.
    """
    if str(text).isdigit():
        return datetime.fromtimestamp(int(str(text)), UTC) if int(str(text)) else None
    try:
        return datetime.strptime(str(text), "%a %b %d %H:%M:%S %Y").replace(tzinfo=UTC)
    except ValueError:
        return None

"""Runs Slurm's commands and parses their output: partitions, nodes, states of jobs, and accounting
data.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta

from cavvy.catalog.accelerators import PROFILE, find_accelerator
from cavvy.domain.host_lists import expand
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import Scalar, TaskSpec, TopologyNeed
from cavvy.providers.base import GangSpec, Manifest, ProviderContext, Refused
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
from cavvy.providers.slurm import with_containers
from cavvy.providers.slurm.script import (
    make_export,
    make_options,
    make_script,
    object_to_topology,
    read_own_options,
)

_TOOLS = ("sbatch", "squeue", "scancel", "scontrol", "sacct", "sacctmgr")
DIALECT = BatchDialect(
    title="Slurm",
    submit=("sbatch", "--parsable"),
    cancel="scancel",
    job_id=r"\d+",
    prefix="sbatch: error: ",
    later="unable to contact|socket timed out|connection refused|connect failure|zero bytes|"
    "communication|backup controller|temporarily|timed out|slurm_receive_msg|no answer within|"
    "send/recv",
    not_sent="unable to contact|connection refused|connect failure",
    elsewhere="node configuration is not available|nodes are busy|more processors|"
    "memory specification|nodes required for job are down|invalid partition|"
    "partition.*(down|drain|inactive)|invalid generic resource|node count specification",
    gone="already|Invalid job id",
    environ={"SLURM_TIME_FORMAT": "%s"},
)
_BREAK = "\x1f"
# states and reason codes of held jobs: https://slurm.schedmd.com/job_reason_codes.html
_HELD = frozenset({"REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"}) | {
    "JobHeldAdmin",
    "JobHeldUser",
    "JobHoldMaxRequeue",
    "launch failed requeued held",
    "launch_failed_requeued_held",
}
_PHASES = {
    **dict.fromkeys(
        ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"),
        BatchPhase.WAITS,
    ),
    "CONFIGURING": BatchPhase.BEGINS,
    **dict.fromkeys(
        ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "STAGE_OUT"),
        BatchPhase.WORKS,
    ),
}
# The final states of jobs. CANCELLED means that Cavvy cancelled the job if its gang is marked as
# removed, and otherwise that a person did.
_ENDS = {
    "COMPLETED": "the agents exited",
    "FAILED": "the agents failed",
    "CANCELLED": "the job was cancelled in Slurm, not by Cavvy",
    "PREEMPTED": "Slurm gave the job's nodes to a job with higher priority",
    "TIMEOUT": "the job reached Slurm's time limit",
    "DEADLINE": "the job reached Slurm's deadline",
    "NODE_FAIL": "a node failed",
    "BOOT_FAIL": "a node did not boot",
    "OUT_OF_MEMORY": "the job used more memory than requested",
    "REVOKED": "Slurm moved the job to another cluster",
}
_TAKEN = frozenset({"PREEMPTED", "TIMEOUT"})
_DOWN = re.compile(
    "DOWN|DRAIN|DRAINED|DRAINING|ERROR|FAIL|FAILING|FUTURE|MAINT|NOT_RESPONDING|RESERVED|UNKNOWN"
)
_GRES = re.compile(r"(?<![^,])(gpu|shard)(?::([^:(,]+))?:(\d+)")
_DAYS = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
Row = Mapping[str, str]
Facts = Sequence[tuple[str, str]]
_ENFORCING = {
    "associations",
    "limits",
    "qos",
    "safe",
    "wckeys",
    "all",
}  # the values of AccountingStorageEnforce with which jobs need an association


def make_provider(manifest: Manifest, context: ProviderContext) -> BatchProvider:
    """Create the provider of one cluster."""
    manifest = with_containers(manifest, str(context.settings.get("container", "")))
    settings = context.settings
    where = read_where(settings, _TOOLS)
    return BatchProvider(manifest, context, where, lambda login: SlurmSystem(settings, login))


class SlurmSystem:
    """Implements `BatchSystem` for Slurm."""

    title, queues = "Slurm", "partitions"

    def __init__(self, settings: Mapping[str, Scalar], login_session: LoginSession) -> None:
        self.commands = BatchCommands(login_session, DIALECT)
        self.job_options = read_job_options(settings, "sbatch_options")
        self._qos = str(settings.get("qos", ""))
        self._pyxis = settings.get("container") == "pyxis"
        named = str(settings.get("partitions", "")).split(",")
        self._partitions = [each.strip() for each in named if each.strip()]

    def object_to_topology(self, need: TopologyNeed) -> str:
        return object_to_topology(need, self.job_options)

    async def read_cluster(self) -> BatchCluster:
        partitions = await self._show("show", "partition")
        return read_cluster(
            await self._config(), partitions, await self._show("--details", "show", "nodes")
        )

    async def jobs(self, uid: int, mark: str) -> Sequence[BatchJobRow]:
        fields = _BREAK.join(("%i", "%j", "%T", "%r", "%N", "%S", "%e", "%k"))
        argv = ["squeue", "--noheader", "--states=all", f"--user={uid}", f"--format={fields}"]
        rows = _split_rows(await self.commands.ask(argv))
        return [read_row(parts) for parts in rows if parts[7].strip() == mark]

    async def accounted(self, job: str) -> BatchJobRow | None:
        if "sacct" not in (await self.commands.login_session.hello()).tools:
            return None
        fields = "JobIDRaw,JobName,State,Reason,NodeList,Start,End,Comment"
        argv = ["sacct", "-X", "-n", "-P", "--delimiter", _BREAK, "-j", job, "-o", fields]
        done = await self.commands.run(argv)
        rows = _split_rows(done.out)
        return read_row(rows[0]) if done.code == 0 and rows else None

    async def explain_accounts(self, user: str, hello: HelperHello) -> Sequence[tuple[str, str]]:
        limits = await self._limits(user) if "sacctmgr" in hello.tools else ()
        account = self.job_options.account
        return explain_accounts(account, user, await self._config(), hello.tools, limits)

    def make_job(
        self, gang: GangSpec, queue: ClusterQueue, files: JobFiles
    ) -> tuple[Sequence[str], str]:
        own = read_own_options(gang, self._partitions)
        options = make_options(gang, queue, files, self.job_options, self._qos, own)
        return options, make_script(gang, files, self.job_options.python, pyxis=self._pyxis)

    def export(self, task: TaskSpec, offer: Offer | None, nodes: int) -> str:
        return make_export(task, offer, nodes, self.job_options, self._qos)

    async def _show(self, *what: str) -> Sequence[Row]:
        """Return the lines of `scontrol show ... --oneliner`, each parsed to a mapping."""
        out = await self.commands.ask(["scontrol", "--oneliner", *what])
        return [parse_pairs(line) for line in out.splitlines()]

    async def _config(self) -> Row:
        """Return the configuration of slurmctld."""
        out = await self.commands.ask(["scontrol", "show", "config"])
        pairs = (line.partition("=") for line in out.splitlines())
        return {name.strip(): value.strip() for name, equals, value in pairs if equals}

    async def _limits(self, user: str) -> Sequence[tuple[str, str]]:
        """Return the limits of the user's associations and of all qualities of service."""
        found = []
        for account, qualities, *limits in await self._account_rows(
            "assoc", f"user={user}", "format=Account,QOS,GrpTRES,MaxTRES,MaxJobs"
        ):
            text = _say_limits(("group", "per job", "jobs"), limits)
            found.append((f"account {account}", f"{text}; QOS {qualities}"))
        for name, *limits in await self._account_rows(
            "qos", "format=Name,GrpTRES,MaxTRESPU,MaxJobsPU,MaxWall"
        ):
            if any(limits):
                text = _say_limits(("group", "per user", "jobs per user", "time"), limits)
                found.append((f"QOS {name}", text))
        return found

    async def _account_rows(self, *what: str) -> Sequence[Sequence[str]]:
        done = await self.commands.run(["sacctmgr", "-n", "-P", "show", *what])
        return [line.split("|") for line in done.out.splitlines()]


def read_cluster(config: Row, partitions: Sequence[Row], nodes: Sequence[Row]) -> BatchCluster:
    """Return the cluster as scontrol describes it, with the partitions that are up."""
    rows = [row for row in partitions if row.get("PartitionName") and row.get("State") == "UP"]
    there = [row for row in nodes if "NodeName" in row]
    members = {row["NodeName"]: row.get("Partitions", "").split(",") for row in there}
    read = [node for row in there for node in _read_node(row)]
    by_partition = config.get("PreemptType", "").endswith("partition_prio")
    kill_wait = _number({"KillWait": "30", **config}, "KillWait")
    queues = []
    for row in rows:
        name = row["PartitionName"]
        above = _list_above(row, rows)
        mine = [node for node in read if name in members[node.name]]
        preemptible = by_partition and row.get("PreemptMode", "OFF") != "OFF"
        queues.append(
            ClusterQueue(
                name=name,
                nodes=mine,
                longest=parse_length(row.get("MaxTime", "")),
                taken=preemptible and any(above & set(members[node.name]) for node in mine),
                reclaim_s=max(_number(row, "GraceTime"), kill_wait),
            )
        )
    name, version = config.get("ClusterName", "slurm"), config.get("SLURM_VERSION", "")
    return BatchCluster(name=name, version=version, queues=queues, nodes=read)


def _list_above(row: Row, rows: Sequence[Row]) -> set[str]:
    """Return the partitions whose jobs may preempt jobs of this partition."""
    tier = _number(row, "PriorityTier")
    return {other["PartitionName"] for other in rows if _number(other, "PriorityTier") > tier}


def read_row(parts: Sequence[str]) -> BatchJobRow:
    """Parse a line from squeue or sacct: id, name, state, reason, nodes, start, end, comment."""
    job, name, state, reason, nodes, start, end, _ = (part.strip() for part in parts)
    state = state.split()[0] if state else ""  # such as "CANCELLED by 1000"
    phase = _PHASES.get(state, BatchPhase.OVER)
    match phase:
        case BatchPhase.WAITS:
            text = "waits in Slurm's queue" if reason in ("", "None") else f"Slurm: {reason}"
            if not _HELD.isdisjoint((state, reason)):
                text += f"; Slurm does not start it before someone runs: scontrol release {job}"
        case BatchPhase.BEGINS:
            text = "Slurm is preparing the nodes"
        case _:
            usual = {"RUNNING": "", **_ENDS}
            text = usual.get(state, f"Slurm: {state.lower()}")
    return BatchJobRow(
        id=job,
        name=name,
        phase=phase,
        reason=text,
        hosts=() if nodes.startswith("None") else tuple(expand(nodes)),
        start=_time(start),
        end=_time(end),
        taken=state in _TAKEN,
        cancelled=state == "CANCELLED",
        broke=state == "FAILED",
    )


def parse_pairs(line: str) -> dict[str, str]:
    """Parse a line such as `A=1 B=two words C=3`, in which values may contain spaces."""
    parts = re.split(r"(?:^|\s)([A-Za-z_/:]+)=", line)
    return {name: value.strip() for name, value in zip(parts[1::2], parts[2::2], strict=True)}


def parse_length(text: str) -> timedelta | None:
    """Parse Slurm's `[days-]hours:minutes:seconds`; return None for UNLIMITED and similar
    values."""
    found = _DAYS.fullmatch(text)
    if found is None:
        return None
    days, first, second, third = (int(group or 0) for group in found.groups())
    if found[1]:
        return timedelta(days=days, hours=first, minutes=second, seconds=third)
    if found[4]:
        return timedelta(hours=first, minutes=second, seconds=third)
    return timedelta(minutes=first, seconds=second)


def _read_node(row: Row) -> Sequence[ClusterNode]:
    """Return a node, once for each kind of its GPUs."""
    kinds = {kind: n for kind, n in _count_gres(row.get("Gres", ""), "gpu").items() if n}
    shards = _count_gres(row.get("Gres", ""), "shard")
    # shards without a type are those of the node's only kind of GPUs
    rest = shards.get("", 0) if len(kinds) == 1 else 0
    if not kinds:
        return [_read_kind(row, "", 0, 0, "")]
    return [
        _read_kind(row, kind, gpus, shards.get(kind, rest) // gpus, _find_model(kind, row, kinds))
        for kind, gpus in kinds.items()
    ]


def _read_kind(row: Row, kind: str, gpus: int, shards: int, model: str) -> ClusterNode:
    used = row.get("GresUsed", "")
    total = _number(row, "CPUTot")
    memory = _number(row, "RealMemory") - _number(row, "MemSpecLimit")
    states = row.get("State", "").upper()
    shape = NodeShape(
        cpus=_number(row, "CPUEfctv") or total,
        memory_mib=memory,
        gpus=gpus,
        gpu=kind,
        model=model,
        shards=shards,
    )
    words = [word.rstrip("~#!%$@^-") for word in states.split("+")]
    if "*" in states or any(map(_DOWN.fullmatch, words)):
        return ClusterNode(name=row["NodeName"], shape=shape, up=False)
    sharing = _read_shards(used, kind) if shards else ()
    whole = gpus - _count_gres(used, "gpu").get(kind, 0) - len(sharing)
    free = NodeShape(
        cpus=total - _number(row, "CPUAlloc"),
        memory_mib=memory - _number(row, "AllocMem"),
        gpus=whole,
        gpu=kind,
        shards=shards if whole > 0 else shards - min(sharing, default=shards),
    )
    return ClusterNode(name=row["NodeName"], shape=shape, up=True, free=free)


def _count_gres(text: str, name: str) -> Mapping[str, int]:
    """Return the count of each type of GRES in text such as "gpu:h100:8(S:0-1),lustre:1"."""
    found: dict[str, int] = {}
    for each, kind, count in _GRES.findall(text):
        if each == name:
            found[kind] = found.get(kind, 0) + int(count)
    return found


def _read_shards(used: str, kind: str) -> Sequence[int]:
    """Return how many shards jobs hold of each GPU of which they hold some. Slurm 23 lists them for
    each GPU, as in "shard:a100:6(4/4,2/4,0/4)". Before, it lists only the GPUs, as in
    "shard:a100:2(IDX:0-1)"; at least one shard of each is held."""
    for found in re.finditer(r"shard(?::([^:(,]+))?:\d+\(([^)]*)\)", used):
        if (found[1] or kind) != kind:
            continue
        if held := [int(n) for n in re.findall(r"(\d+)/\d+", found[2])]:
            return [each for each in held if each]
        _, _, spans = found[2].partition("IDX:")
        bounds = [each.split("-") for each in spans.split(",") if each[:1].isdigit()]
        return [1] * sum(int(span[-1]) - int(span[0]) + 1 for span in bounds)
    return ()


def _find_model(kind: str, row: Row, kinds: Iterable[str]) -> str:
    """Return the model of which MIG has made the instances of a kind named by a profile alone. It
    is that of the node's other GPUs, or the only one that the node's features name."""
    if not PROFILE.fullmatch(kind.lower()):
        return ""
    for words in (kinds, row.get("AvailableFeatures", "").split(",")):
        models = {word for word in words if word and find_accelerator(word)}
        if len(models) == 1:
            return models.pop()
    return ""


def _split_rows(out: str) -> Sequence[Sequence[str]]:
    return [parts for line in out.splitlines() if len(parts := line.split(_BREAK)) == 8]


def _number(row: Row, name: str) -> int:
    found = re.match(r"\d+", row.get(name, ""))
    return int(found[0]) if found else 0


def _time(text: str) -> datetime | None:
    return datetime.fromtimestamp(int(text), UTC) if text.isdigit() and int(text) else None


def _say_limits(names: Sequence[str], values: Sequence[str]) -> str:
    given = [f"{name} {value}" for name, value in zip(names, values, strict=False) if value]
    return ", ".join(given) or "no limits"


def explain_accounts(
    account: str, user: str, config: Mapping[str, str], tools: Sequence[str], limits: Facts
) -> Facts:
    """Return the facts about the account for `cavvy check`. `limits` are the limits of the user's
    associations. If `account` is "", jobs use the user's default account.

    Raises Refused if Slurm would refuse every job because of its account.
    """
    names = list(
        dict.fromkeys(
            what.removeprefix("account ") for what, _ in limits if what.startswith("account ")
        )
    )
    if not config.get("AccountingStorageType", "").endswith("slurmdbd"):
        why = "the cluster stores no accounting data (slurmdbd)"
    elif "sacctmgr" not in tools:
        why = "the login node has no sacctmgr"
    elif not names:  # `limits` may still list qualities of service, which apply to all users
        why = f"the cluster's accounting does not list {user}"
    else:
        told = [("account", account)] if account else []
        _refuse(account, user, config, names)
        return [*told, ("limits", "known to the cluster's accounting"), *limits]
    told = [("account", f"{account}: could not be checked: {why}")] if account else []
    return [*told, ("limits", why), *limits]


def _refuse(account: str, user: str, config: Mapping[str, str], names: Sequence[str]) -> None:
    """Raise Refused if Slurm requires that the user has an association with the account, but the
    user has none.
    """
    enforced = {
        word.strip().lower() for word in config.get("AccountingStorageEnforce", "").split(",")
    }
    if (
        account
        and account.lower() not in {name.lower() for name in names}
        and enforced & _ENFORCING
    ):
        raise Refused(
            f"the setting `account` of [providers.slurm] is {account}, which is not an account of "
            f"{user}, so Slurm would refuse every job: use one of {', '.join(names)}, or remove "
            "the setting to use the default account"
        )

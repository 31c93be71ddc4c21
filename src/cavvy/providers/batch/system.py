"""The interface of a batch system, and the offers of its queues and nodes. Implementations contain
the system's commands, output formats and resource options.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Protocol

from cavvy.domain.offers import Offer
from cavvy.domain.tasks import Scalar, TaskSpec, TopologyNeed
from cavvy.domain.values import Struct, field, replace
from cavvy.providers.base import GangSpec, Refused
from cavvy.providers.batch.commands import BatchCommands, BatchJobRow
from cavvy.providers.batch.login_session import HelperHello, read_words
from cavvy.providers.batch.shapes import (
    NodeShape,
    OfferLocation,
    PartPrices,
    gpu_of,
    is_instance,
    list_parts,
    make_offer,
    name_pool,
    shards_of,
)

_NOTHING = NodeShape(cpus=0, memory_mib=0, gpus=0, gpu="")
_PREPARATION = timedelta(
    hours=1
)  # time for preparing folders and running setups, which is added to the work's own limit


class ClusterNode(Struct, frozen=True, kw_only=True):
    """One node, or its GPUs of one kind if it has several. `free` is the unallocated part of the
    node, whose `shards` are those of one GPU; it is zero if the node is down or drained.
    """

    name: str
    shape: NodeShape
    up: bool
    free: NodeShape = _NOTHING


class ClusterQueue(Struct, frozen=True, kw_only=True):
    """A PBS queue or a Slurm partition, with the nodes that its jobs may use."""

    name: str
    nodes: Sequence[ClusterNode]
    longest: timedelta | None  # time limit of the queue's jobs; None if there is none
    taken: bool  # True if the queue's jobs may be preempted
    reclaim_s: float  # seconds between SIGTERM and SIGKILL when a job of the queue is preempted


class BatchCluster(Struct, frozen=True, kw_only=True):
    """A snapshot of a cluster's queues and nodes."""

    name: str
    version: str
    queues: Sequence[ClusterQueue]
    nodes: Sequence[ClusterNode]

    def queue(self, name: str | None) -> ClusterQueue | None:
        return next((each for each in self.queues if each.name == name), None)


def list_offers(
    cluster: BatchCluster,
    prices: PartPrices,
    *,
    provider: str,
    title: str,
    queue: bool,
    by_user: bool = False,
) -> Sequence[Offer]:
    """Return one offer for each queue, kind of node and number of accelerators. For nodes without
    accelerators, return one offer for each part that `list_parts` lists. Each accelerator has an
    equal share of the node's CPUs and memory.

    If `queue` is True, jobs can wait in the batch system's own queue, so offers have no capacity
    limit. `by_user` is True if jobs run as the Unix users of their users.
    """
    kinds: dict[tuple[str, NodeShape], list[ClusterNode]] = {}
    for each in cluster.queues:
        for node in sorted((n for n in each.nodes if n.up and n.shape.cpus), key=_size):
            whole = replace(node.shape, shards=0)
            kinds.setdefault((each.name, whole), []).append(node)
    taken = {each.name: each.taken for each in cluster.queues}
    groups = [{node.name for node in alike} for alike in kinds.values()]
    offers = {}  # by offer key, because parts of two kinds of nodes may have the same size
    for (name, shape), alike in kinds.items():
        location = OfferLocation(
            provider=provider,
            cluster=cluster.name,
            queue=name,
            taken=taken[name],
            widest=max(node.shape.cpus for node in cluster.nodes),
            pool=name_pool((node.name for node in alike), groups),
        )
        for node_shape, part, having in _list_parts(shape, alike):
            idle = sum(_holds(node.free, part) for node in having)
            offer = make_offer(
                location,
                node_shape,
                part,
                prices,
                capacity=None if queue else idle,
                source=f"{title}, {idle} idle",
            )
            offers[offer.key] = replace(offer, by_user=by_user)
    return list(offers.values())


def _list_parts(
    shape: NodeShape, alike: Sequence[ClusterNode]
) -> Iterator[tuple[NodeShape, NodeShape, Sequence[ClusterNode]]]:
    """Yield the nodes' shape, each part of it, and the nodes that have this part. Nodes may differ
    in the shards of their GPUs."""
    for part in list_parts(shape):
        if part.gpus <= 1 or not is_instance(part.gpu):  # CUDA programs use only one MIG instance
            yield shape, part, alike
    for shards in sorted({node.shape.shards for node in alike} - {0}):
        having = [node for node in alike if node.shape.shards == shards]
        shared = replace(shape, shards=shards)
        for part in list_parts(shared):
            if part.shards:
                yield shared, part, having


def count_room(queue: ClusterQueue, offer: Offer) -> int:
    """Return the number of the queue's nodes that are large enough for the offer, including nodes
    that are busy or down now.
    """
    kind = gpu_of(offer)
    _, shards = shards_of(offer)
    fitting = {
        node.name
        for node in queue.nodes
        if node.shape.cpus >= offer.vcpus
        and node.shape.memory_mib >= offer.memory_mib
        and node.shape.gpus >= offer.accelerator_count
        and (not kind or node.shape.gpu == kind)
        and shards in (0, node.shape.shards)
    }
    return len(fitting)


def time_limit(gang: GangSpec, queue: ClusterQueue) -> timedelta | None:
    """Return the time limit of a job: the maximum duration of the work, plus its grace period and
    the time for preparation, but at most the queue's limit. If the maximum duration is unknown,
    return the queue's limit.

    The queue's default time limit is never used, because that limit would interrupt long work.
    """
    if gang.longest is None:
        return queue.longest
    wanted = gang.longest + gang.grace + _PREPARATION
    return wanted if queue.longest is None else min(wanted, queue.longest)


def _size(node: ClusterNode) -> tuple[int, str, int, int]:
    shape = node.shape
    return shape.gpus, shape.gpu, shape.cpus, shape.memory_mib


def _holds(free: NodeShape, part: NodeShape) -> bool:
    enough = free.cpus >= part.cpus and free.memory_mib >= part.memory_mib
    return enough and (free.shards >= part.shards if part.shards else free.gpus >= part.gpus)


# Shell lines that wait for the background process {process} to end, even if signals arrive
# meanwhile. Then `code` is its exit code.
WAIT = """while :; do
    wait {process}
    code=$?
    kill -0 {process} 2>/dev/null || break # else it was a signal that ended the waiting
done"""


class JobOptions(Struct, frozen=True, kw_only=True):
    """The settings that apply to every job."""

    account: str = ""
    options: Sequence[str] = ()  # the user's additional arguments for the submit command
    python: str = "python3"
    warning_s: int = 60  # seconds between the warning and the time limit
    # what the system calls the labels in a task's `topology`, by these labels
    topology: Mapping[str, str] = field(default_factory=dict)


class JobFiles(Struct, frozen=True, kw_only=True):
    """The paths of the files for a gang's job, and the mark by which Cavvy finds the job."""

    mark: str
    folder: str  # the gang's folder
    agent: str  # the folder of the programs that nodes run


class BatchSystem(Protocol):
    """One batch system on one login node. Every asynchronous method may raise TryAgain and
    Refused.
    """

    title: str  # shown to users
    queues: str  # the system's term for queues, which is also the name of the setting
    commands: BatchCommands
    job_options: JobOptions

    def object_to_topology(self, need: TopologyNeed) -> str:
        """Return why the system cannot place nodes as required, or "". `need.same` is a key of
        `job_options.topology`."""

    async def read_cluster(self) -> BatchCluster:
        """Return all queues to which this user may submit jobs, and all nodes."""

    async def jobs(self, uid: int, mark: str) -> Sequence[BatchJobRow]:
        """Return the jobs with this installation's mark, including jobs that ended recently."""

    async def accounted(self, job: str) -> BatchJobRow | None:
        """Return the accounting record of a job that `jobs` no longer lists, or None if no record
        exists."""

    async def explain_accounts(self, user: str, hello: HelperHello) -> Sequence[tuple[str, str]]:
        """Describe the user's accounts and limits, for `cavvy check`."""

    def make_job(
        self, gang: GangSpec, queue: ClusterQueue, files: JobFiles
    ) -> tuple[Sequence[str], str]:
        """Return the options and the script for the submit command."""

    def export(self, task: TaskSpec, offer: Offer | None, nodes: int) -> str:
        """See `ExportsTasks.export`."""


def read_job_options(settings: Mapping[str, Scalar], options: str) -> JobOptions:
    """Read the settings for jobs. `options` is the name of the setting with additional arguments.
    Raises Refused.
    """
    return JobOptions(
        account=str(settings.get("account", "")),
        options=read_words(settings, options),
        python=str(settings.get("python", "")) or "python3",
        warning_s=int(settings.get("warning_s", 60)),
        topology=_read_topology(str(settings.get("topology", ""))),
    )


def _read_topology(text: str) -> Mapping[str, str]:
    words = text.replace(",", " ").split()
    for word in words:
        if not all(word.partition("=")):
            raise Refused(f"topology: {word!r} does not have the form name=value")
    return dict(word.partition("=")[::2] for word in words)

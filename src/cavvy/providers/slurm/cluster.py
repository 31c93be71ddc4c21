"""What a cluster has: its partitions and nodes, as offers."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

from cavvy.domain.offers import Offer
from cavvy.providers.batch.shapes import (
    NodeShape,
    OfferLocation,
    PartPrices,
    gpu_of,
    list_parts,
    make_offer,
    name_pool,
)

_GONE = {
    "DOWN",
    "DRAIN",
    "DRAINED",
    "DRAINING",
    "ERROR",
    "FAIL",
    "FAILING",
    "FUTURE",
    "MAINT",
    "NOT_RESPONDING",
}
_GONE |= {"RESERVED", "UNKNOWN"}
_GRES = re.compile(r"gpu(?::([^:(,]+))?:(\d+)")
_DAYS = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmNode:
    """One node and what is free of it now; nothing of one that is down or drained."""

    name: str
    partitions: tuple[str, ...]
    shape: NodeShape
    up: bool
    free_cpus: int
    free_memory_mib: int
    free_gpus: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmPartition:
    """One partition. `taken`: higher ones may take its nodes back. `longest` None is without
    limit.
    """

    name: str
    taken: bool
    longest: timedelta | None
    grace: timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmCluster:
    """A cluster at one moment."""

    name: str
    version: str
    partitions: tuple[SlurmPartition, ...]
    nodes: tuple[SlurmNode, ...]
    kill_wait: timedelta

    def partition(self, name: str | None) -> SlurmPartition | None:
        return next((each for each in self.partitions if each.name == name), None)


def read_cluster(
    config: Mapping[str, str],
    partitions: Sequence[Mapping[str, str]],
    nodes: Sequence[Mapping[str, str]],
    wanted: Sequence[str],
) -> SlurmCluster:
    """Make sense of what scontrol shows; `wanted` () are all partitions."""
    rows = [row for row in partitions if row.get("PartitionName") and row.get("State") == "UP"]
    read = tuple(_node(row) for row in nodes if row.get("NodeName"))
    by_partition = config.get("PreemptType", "").endswith("partition_prio")
    seconds = re.match(r"\d+", config.get("KillWait", ""))
    return SlurmCluster(
        name=config.get("ClusterName", "slurm"),
        version=config.get("SLURM_VERSION", ""),
        partitions=tuple(
            _partition(row, rows, read, by_partition)
            for row in rows
            if not wanted or row["PartitionName"] in wanted
        ),
        nodes=read,
        kill_wait=timedelta(seconds=int(seconds[0]) if seconds else 30),
    )


def list_offers(cluster: SlurmCluster, prices: PartPrices, *, queue: bool) -> Sequence[Offer]:
    """One offer for each partition, kind of node and number of accelerators, or size where there
    are none.

    CPUs and memory go with the accelerators, in equal shares of the node.
    """
    offers = []
    kinds: dict[tuple[SlurmPartition, NodeShape], list[SlurmNode]] = {}
    for partition in cluster.partitions:
        mine = [node for node in cluster.nodes if partition.name in node.partitions and node.up]
        for node in sorted(
            mine, key=lambda n: (n.shape.gpus, n.shape.gpu, n.shape.cpus, n.shape.memory_mib)
        ):
            kinds.setdefault((partition, node.shape), []).append(node)
    groups = [{node.name for node in alike} for alike in kinds.values()]
    for (partition, shape), alike in kinds.items():
        pool = name_pool((node.name for node in alike), groups)
        for part in list_parts(shape):
            idle = sum(_fits(node, part) for node in alike)
            offer = _offer(cluster, partition, shape, part, prices, None if queue else idle, idle)
            offers.append(replace(offer, pool=pool))
    return list(
        {offer.key: offer for offer in offers}.values()
    )  # a size of two kinds of nodes is one offer


def _fits(node: SlurmNode, part: NodeShape) -> bool:
    enough = node.free_cpus >= part.cpus and node.free_memory_mib >= part.memory_mib
    return enough and node.free_gpus >= part.gpus


def _offer(
    cluster: SlurmCluster,
    partition: SlurmPartition,
    shape: NodeShape,
    part: NodeShape,
    prices: PartPrices,
    capacity: int | None,
    idle: int,
) -> Offer:
    return make_offer(
        OfferLocation(
            provider="slurm",
            cluster=cluster.name,
            queue=partition.name,
            taken=partition.taken,
            widest=max(node.shape.cpus for node in cluster.nodes),
        ),
        shape,
        part,
        prices,
        capacity=capacity,
        source=f"Slurm, {idle} idle",
    )


def count_room(cluster: SlurmCluster, offer: Offer) -> int:
    """How many of the partition's nodes could ever hold one node of the offer, busy or down as
    they may be.
    """
    kind = gpu_of(offer)
    return sum(
        offer.zone in node.partitions
        and node.shape.cpus >= offer.vcpus
        and node.shape.memory_mib >= offer.memory_mib
        and node.shape.gpus >= offer.accelerator_count
        and (not kind or node.shape.gpu == kind)
        for node in cluster.nodes
    )


def gres_of(offer: Offer) -> str:
    """What sbatch asks for to get the offer's accelerators; "" where it has none."""
    if not offer.accelerator_count:
        return ""
    return ":".join(filter(None, ("gpu", gpu_of(offer), str(offer.accelerator_count))))


def _node(row: Mapping[str, str]) -> SlurmNode:
    kind, gpus = _gpus(row.get("Gres", ""))
    total, memory = (
        _number(row, "CPUTot"),
        _number(row, "RealMemory") - _number(row, "MemSpecLimit"),
    )
    states = row.get("State", "").upper()
    up = "*" not in states and not _GONE & {word.rstrip("~#!%$@^-") for word in states.split("+")}
    return SlurmNode(
        name=row["NodeName"],
        partitions=tuple(row.get("Partitions", "").split(",")),
        shape=NodeShape(
            cpus=_number(row, "CPUEfctv") or total, memory_mib=memory, gpus=gpus, gpu=kind
        ),
        up=up,
        free_cpus=total - _number(row, "CPUAlloc") if up else 0,
        free_memory_mib=memory - _number(row, "AllocMem") if up else 0,
        free_gpus=gpus - _gpus(row.get("GresUsed", ""))[1] if up else 0,
    )


def _gpus(text: str) -> tuple[str, int]:
    """The type and number of GPUs in "gpu:h100:8(S:0-1),lustre:1"; of several types the first."""
    found = _GRES.findall(text)
    if not found:
        return "", 0
    kind = found[0][0]
    return kind, sum(int(count) for other, count in found if other == kind)


def _partition(
    row: Mapping[str, str],
    rows: Sequence[Mapping[str, str]],
    nodes: Sequence[SlurmNode],
    by_partition: bool,
) -> SlurmPartition:
    name, tier = row["PartitionName"], _number(row, "PriorityTier")
    mine = {node.name for node in nodes if name in node.partitions}
    above = [
        other["PartitionName"]
        for other in rows
        if _number(other, "PriorityTier") > tier
        and any(node.name in mine for node in nodes if other["PartitionName"] in node.partitions)
    ]
    taken = by_partition and row.get("PreemptMode", "OFF") != "OFF" and bool(above)
    longest = parse_length(row.get("MaxTime", ""))
    return SlurmPartition(
        name=name, taken=taken, longest=longest, grace=timedelta(seconds=_number(row, "GraceTime"))
    )


def parse_length(text: str) -> timedelta | None:
    """Slurm's `[days-]hours:minutes:seconds`; None for UNLIMITED and the like."""
    found = _DAYS.fullmatch(text)
    if found is None:
        return None
    days, first, second, third = (int(group or 0) for group in found.groups())
    if found[1]:
        return timedelta(days=days, hours=first, minutes=second, seconds=third)
    if found[4]:
        return timedelta(hours=first, minutes=second, seconds=third)
    return timedelta(minutes=first, seconds=second)


def _number(row: Mapping[str, str], name: str) -> int:
    found = re.match(r"\d+", row.get(name, ""))
    return int(found[0]) if found else 0

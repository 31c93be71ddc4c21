"""What a PBS cluster has: its queues and nodes, as offers."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

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

_SIZES_KIB = {"b": 1 / 1024, "kb": 1, "mb": 1024, "gb": 1024**2, "tb": 1024**3}
_USABLE = {"free", "job-busy", "job-exclusive", "busy", "resv-exclusive"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PbsQueue:
    """One execution queue. `longest` None is without limit."""

    name: str
    longest: timedelta | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PbsNode:
    """One node and what is free of it. `queue` "": any queue may use it."""

    name: str
    queue: str
    shape: NodeShape
    up: bool
    free_cpus: int
    free_memory_mib: int
    free_gpus: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PbsCluster:
    name: str
    version: str
    queues: tuple[PbsQueue, ...]
    nodes: tuple[PbsNode, ...]

    def queue(self, name: str | None) -> PbsQueue | None:
        return next((each for each in self.queues if each.name == name), None)

    def nodes_of(self, queue: str) -> Sequence[PbsNode]:
        """The nodes that a queue may use: its own where it has some, else those of no queue."""
        own = [node for node in self.nodes if node.queue == queue]
        return own or [node for node in self.nodes if not node.queue]


def read_cluster(
    server: tuple[str, Mapping[str, Any]],
    queues: Mapping[str, Mapping[str, Any]],
    nodes: Mapping[str, Mapping[str, Any]],
    *,
    wanted: Sequence[str],
    gpu: str,
    gpu_resource: str,
) -> PbsCluster:
    """Make sense of what PBS shows; `wanted` () are all queues. `gpu` "": nodes name it in
    `gpu_resource`.
    """
    name, facts = server
    usable = [
        PbsQueue(name=queue, longest=_length(row.get("resources_max", {}).get("walltime")))
        for queue, row in queues.items()
        if str(row.get("queue_type", "")).lower().startswith("e")
        and str(row.get("enabled")) == "True"
        and str(row.get("started")) == "True"
        and (not wanted or queue in wanted)
    ]
    return PbsCluster(
        name=name.split(".")[0],
        version=str(facts.get("pbs_version", "")),
        queues=tuple(usable),
        nodes=tuple(_node(node, row, gpu, gpu_resource) for node, row in nodes.items()),
    )


def list_offers(
    cluster: PbsCluster, prices: PartPrices, *, spot: Sequence[str], queue: bool
) -> Sequence[Offer]:
    """One offer for each queue, kind of node and number of accelerators, or size where there are
    none.
    """
    offers = {}
    kinds: dict[tuple[str, NodeShape], list[PbsNode]] = {}
    for each in cluster.queues:
        mine = [node for node in cluster.nodes_of(each.name) if node.up and node.shape.cpus]
        for node in sorted(
            mine, key=lambda n: (n.shape.gpus, n.shape.gpu, n.shape.cpus, n.shape.memory_mib)
        ):
            kinds.setdefault((each.name, node.shape), []).append(node)
    groups = [{node.name for node in alike} for alike in kinds.values()]
    for (name, shape), alike in kinds.items():
        place = OfferLocation(
            provider="pbs",
            cluster=cluster.name,
            queue=name,
            taken=name in spot,
            widest=max(other.cpus for queued, other in kinds if queued == name),
            pool=name_pool((node.name for node in alike), groups),
        )
        for part in list_parts(shape):
            idle = sum(_fits(node, part) for node in alike)
            capacity = None if queue else idle
            offer = make_offer(
                place, shape, part, prices, capacity=capacity, source=f"PBS, {idle} idle"
            )
            offers[offer.key] = offer
    return list(offers.values())


def count_room(cluster: PbsCluster, offer: Offer) -> int:
    """How many of the queue's nodes could ever hold one node of the offer, busy or down as they
    may be.
    """
    kind = gpu_of(offer)
    return sum(
        node.shape.cpus >= offer.vcpus
        and node.shape.memory_mib >= offer.memory_mib
        and node.shape.gpus >= offer.accelerator_count
        and (not kind or node.shape.gpu == kind)
        for node in cluster.nodes_of(offer.zone or "")
    )


def _fits(node: PbsNode, part: NodeShape) -> bool:
    enough = node.free_cpus >= part.cpus and node.free_memory_mib >= part.memory_mib
    return enough and node.free_gpus >= part.gpus


def _node(name: str, row: Mapping[str, Any], gpu: str, gpu_resource: str) -> PbsNode:
    has, used = row.get("resources_available", {}), row.get("resources_assigned", {})
    cpus, gpus = _whole(has.get("ncpus")), _whole(has.get("ngpus"))
    memory = read_size(has.get("mem"))
    up = set(str(row.get("state", "")).split(",")) <= _USABLE
    kind = (gpu or str(has.get(gpu_resource, ""))) if gpus else ""
    return PbsNode(
        name=name,
        queue=str(row.get("queue", "")),
        shape=NodeShape(cpus=cpus, memory_mib=memory, gpus=gpus, gpu=kind),
        up=up,
        free_cpus=cpus - _whole(used.get("ncpus")) if up else 0,
        free_memory_mib=memory - read_size(used.get("mem")) if up else 0,
        free_gpus=gpus - _whole(used.get("ngpus")) if up else 0,
    )


def read_size(text: object) -> int:
    """`528000000kb` in whole MiB; 0 where there is none."""
    found = re.fullmatch(r"(\d+)\s*([kmgt]?b)?", str(text or "").lower())
    return int(int(found[1]) * _SIZES_KIB[found[2] or "b"] / 1024) if found else 0


def _length(text: object) -> timedelta | None:
    """`48:00:00`, or seconds; None where there is none."""
    parts = [int(part) for part in str(text or "").split(":") if part.isdigit()]
    return (
        timedelta(seconds=sum(part * 60**power for power, part in enumerate(reversed(parts))))
        if parts
        else None
    )


def _whole(value: object) -> int:
    return int(str(value)) if str(value or "").isdigit() else 0

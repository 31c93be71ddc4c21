"""Rates placements on nodes with accelerators by how many free accelerators they make useless for
typical jobs. The module does no I/O; `packing` and the simulation of fleets call it.

The measure is the fragmentation of Weng et al., "Beware of Fragmentation: Scheduling GPU-Sharing
Workloads with Fragmentation Gradient Descent" (USENIX ATC 2023). A job goes to the node whose
fragmentation grows least.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

WHOLE = 1000  # a whole accelerator; parts are counted in thousandths
# Of the jobs, sorted by how often their request occurs, the typical ones are the first that make up
# this part (section 4.2 of the paper).
_TYPICAL = 0.95
# The weights of two terms that the paper does not have, in accelerators. They were chosen on its
# lists of jobs: see docs/guides/simulate.md.
_SHORTAGE_WEIGHT = 0.3  # of the growth of `PlacementRater._count_short`
# of what is left free on the node: among placements with nearly the same growth, the fullest node
# is better
_FREE_WEIGHT = 0.05


class FreeNode(NamedTuple):
    """What is free on a node. `devices` are the free thousandths of each accelerator, in ascending
    order; `kind` is the model of the accelerators."""

    cpus: float
    memory_mib: int
    devices: tuple[int, ...] = ()
    kind: str = ""


class NodeDemand(NamedTuple):
    """What a job needs on a node: `part` thousandths of each of `devices` accelerators, whose model
    is one of `kinds`, or any if that is empty."""

    cpus: float
    memory_mib: int
    devices: int = 0
    part: int = WHOLE
    kinds: tuple[str, ...] = ()


TypicalDemands = Sequence[tuple[NodeDemand, float]]  # each with its part of all jobs


def find_typical(demands: Iterable[NodeDemand]) -> TypicalDemands:
    """Return the most frequent demands."""
    counts = Counter(demands)
    least, typical, seen = _TYPICAL * counts.total(), [], 0
    for demand, count in counts.most_common():
        typical.append((demand, count))
        seen += count
        if seen >= least:
            break
    return [(demand, count / seen) for demand, count in typical]


def find_largest(nodes: Iterable[FreeNode]) -> FreeNode:
    """Return a node as large as the largest of the nodes, resource by resource."""
    nodes = list(nodes)
    return FreeNode(
        max((node.cpus for node in nodes), default=0),
        max((node.memory_mib for node in nodes), default=0),
        max((node.devices for node in nodes), key=len, default=()),
    )


def list_placements(node: FreeNode, demand: NodeDemand) -> Sequence[FreeNode]:
    """Return what is left of the node in each way to place the job on it. A job that needs a part
    of one accelerator can get any that has enough left. Other jobs get the fullest ones."""
    if not _has_room(node, demand):
        return ()
    fitting = [free for free in node.devices if free >= demand.part]
    if len(fitting) < demand.devices:
        return ()
    choices = (
        [[free] for free in dict.fromkeys(fitting)]
        if demand.devices == 1
        else [fitting[: demand.devices]]
    )
    return [_take(node, demand, taken) for taken in choices]


def measure_fragments(node: FreeNode, typical: TypicalDemands) -> float:
    """Return how many thousandths of free accelerators of the node a typical job cannot use: F_n(M)
    in section 4.2 of the paper. A job that does not fit on the node, or needs no accelerator, can
    use none of them. Other jobs can use those that have enough left."""
    everything, unusable = sum(node.devices), 0.0
    for demand, part in typical:
        useless = everything
        if demand.devices and _has_room(node, demand):
            fitting = [free for free in node.devices if free >= demand.part]
            if len(fitting) >= demand.devices:
                useless -= sum(fitting)
        unusable += part * useless
    return unusable


class PlacementRater:
    """Rates placements on nodes; lower is better. `largest` is the size of the largest node."""

    def __init__(self, typical: TypicalDemands, largest: FreeNode) -> None:
        self._typical, self._largest = typical, largest
        parts = sum(part * each.devices * each.part for each, part in typical)
        wanted = [(each, part) for each, part in typical if each.devices]
        # what the typical jobs need on average beside a thousandth of an accelerator
        self._cpus = sum(part * each.cpus for each, part in wanted) / parts if parts else 0.0
        self._mib = sum(part * each.memory_mib for each, part in wanted) / parts if parts else 0.0
        self._known: dict[FreeNode, float] = {}

    def rate(self, before: FreeNode, after: FreeNode) -> float:
        """Return the growth of the fragmentation, in accelerators, plus a part of the growth of the
        shortage of CPUs and memory, and a little for what stays free on the node."""
        short = self._count_short(after) - self._count_short(before)
        growth = self.measure_growth(before, after) + _SHORTAGE_WEIGHT * short
        return growth / WHOLE + _FREE_WEIGHT * measure_free(after, self._largest)

    def measure_growth(self, before: FreeNode, after: FreeNode) -> float:
        """Return by how many thousandths of accelerators the fragmentation of the node grows."""
        return self._measure(after) - self._measure(before)

    def _count_short(self, node: FreeNode) -> float:
        """Return how many thousandths of free accelerators would stay free because the CPUs or the
        memory of the node run out first, if it were filled with typical jobs."""
        free = sum(node.devices)
        return max(
            0.0,
            free - node.cpus / self._cpus if self._cpus else 0.0,
            free - node.memory_mib / self._mib if self._mib else 0.0,
        )

    def _measure(self, node: FreeNode) -> float:
        found = self._known.get(node)
        if found is None:
            found = self._known[node] = measure_fragments(node, self._typical)
        return found


def measure_free(node: FreeNode, largest: FreeNode) -> float:
    """Return the sum of the free parts of the node's CPUs and accelerators, relative to the largest
    node."""
    devices = len(largest.devices) * WHOLE
    return (node.cpus / largest.cpus if largest.cpus else 0.0) + (
        sum(node.devices) / devices if devices else 0.0
    )


def _has_room(node: FreeNode, demand: NodeDemand) -> bool:
    return (
        demand.cpus <= node.cpus
        and demand.memory_mib <= node.memory_mib
        and (not demand.kinds or node.kind in demand.kinds)
    )


def _take(node: FreeNode, demand: NodeDemand, taken: Sequence[int]) -> FreeNode:
    devices = list(node.devices)
    for free in taken:
        devices.remove(free)
        devices.append(free - demand.part)
    return FreeNode(
        node.cpus - demand.cpus,
        node.memory_mib - demand.memory_mib,
        tuple(sorted(devices)),
        node.kind,
    )

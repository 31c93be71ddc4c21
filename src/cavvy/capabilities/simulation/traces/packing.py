"""Fills a recorded cluster with recorded jobs, one after another, and measures how many of its
accelerators the jobs get. Production rates placements and chooses racks by the same code
(`scheduler.fragmentation` and `scheduler.topology`).

The experiment is that of Weng et al. (USENIX ATC 2023), section 6: jobs are drawn from a list until
they request more accelerators than the cluster has, and none of them ends.
"""

import csv
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from heapq import heappop, heappush
from itertools import groupby
from math import exp
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import NamedTuple, Protocol, TypeVar

from cavvy.capabilities.simulation.traces.readers import TraceError
from cavvy.domain.tasks import TopologyNeed
from cavvy.domain.values import Struct
from cavvy.scheduler.fragmentation import (
    WHOLE,
    FreeNode,
    NodeDemand,
    PlacementRater,
    find_largest,
    find_typical,
    list_placements,
    measure_free,
)
from cavvy.scheduler.topology import HostLabels, Labels, choose_hosts
from cavvy.spec.fields.resources import object_to_topology

DEMAND = 1.3  # requested accelerators, as a multiple of those of the cluster
_POD_COLUMNS = ("cpu_milli", "memory_mib", "num_gpu", "gpu_milli")
_NODE_COLUMNS = ("cpu_milli", "memory_mib", "gpu", "model")
_MOST = 10**12  # larger numbers are rejected
_MOST_DEVICES = 1000
_MOST_NODES = 10_000
_SCORES = 100  # the scheduler of the paper rounds scores to whole numbers up to this

_POINTS = 200  # of one run that are kept for the plot
_PUBLISHED = {"Random": "random", "BestFit": "best fit", "FGD": "FGD"}  # columns, by policy

_T = TypeVar("_T")
_Points = Sequence[tuple[float, float]]
# Chooses one of the placements on a node, and rates it; lower is better.
Choose = Callable[[FreeNode, Sequence[FreeNode]], tuple[float, FreeNode]]


class FleetPod(NamedTuple):
    """One job of a list: what it needs on each of its nodes, and how close these must be."""

    demand: NodeDemand
    nodes: int = 1
    topology: TopologyNeed | None = None

    @property
    def size(self) -> int:
        """The thousandths of accelerators that the job requests."""
        return self.nodes * self.demand.devices * self.demand.part


class PackedList(Struct, frozen=True, kw_only=True):
    """The result of one policy for one list of jobs: the allocated accelerators in percent, for
    each seed. `curve` has points (requested, allocated) in percent for the first seed."""

    jobs: str
    policy: str
    percents: Sequence[float]
    curve: Sequence[tuple[float, float]]

    @property
    def percent(self) -> float:
        return sum(self.percents) / len(self.percents)


def read_pods(path: Path) -> Sequence[FleetPod]:
    """Read jobs from a CSV file with the columns cpu_milli, memory_mib, num_gpu, gpu_milli and,
    optionally, gpu_spec: the allowed models, separated by |. Optional columns for jobs of several
    nodes are nodes, same, prefer and slice, as in a task's `topology`."""
    pods = _read(path, _POD_COLUMNS, _pod)
    if not any(each.demand.devices for each in pods):
        raise TraceError(f"{path}: no job has num_gpu above 0; expected at least one")
    return pods


def _pod(row: Mapping[str, str]) -> FleetPod:
    nodes = _whole(row, "nodes", least=1, most=_MOST_NODES) if row.get("nodes") else 1
    same, prefer = row.get("same") or None, row.get("prefer") or None
    size = _whole(row, "slice", least=1, most=_MOST_NODES) if row.get("slice") else None
    named = same or prefer or size
    topology = TopologyNeed(same=same, prefer=prefer, slice=size) if named else None
    if wrong := object_to_topology(topology, nodes):
        raise ValueError(wrong)
    return FleetPod(_demand(row), nodes, topology)


def _demand(row: Mapping[str, str]) -> NodeDemand:
    devices = _whole(row, "num_gpu", most=_MOST_DEVICES)
    return NodeDemand(
        cpus=_whole(row, "cpu_milli"),
        memory_mib=_whole(row, "memory_mib"),
        devices=devices,
        part=_whole(row, "gpu_milli", least=1, most=WHOLE) if devices else WHOLE,
        kinds=tuple(sorted(filter(None, (row.get("gpu_spec") or "").split("|")))),
    )


def read_nodes(path: Path) -> Sequence[FreeNode]:
    """Read nodes from a CSV file with the columns cpu_milli, memory_mib, gpu and model."""
    nodes = _read(path, _NODE_COLUMNS, _node)
    if not any(each.devices for each in nodes):
        raise TraceError(f"{path}: no node has gpu above 0; expected at least one")
    return nodes


def read_labels(path: Path) -> Sequence[Labels]:
    """Return the labels of each node: all other columns of the file of the nodes, such as rack."""
    known = {"sn", *_NODE_COLUMNS}
    return [
        tuple((name, value) for name, value in row.items() if name and value and name not in known)
        for row in _rows(path, _NODE_COLUMNS)
    ]


def check_labels(lists: Mapping[str, Sequence[FleetPod]], labels: Sequence[Labels]) -> None:
    """Raise TraceError if a job names a label that no node has."""
    known = sorted({name for each in labels for name, _ in each})
    for name, pods in lists.items():
        for need in {pod.topology for pod in pods} - {None}:
            for label in (need.same, need.prefer) if need is not None else ():
                if label is not None and label not in known:
                    named = (
                        f"the labels are {', '.join(known)}" if known else "nodes have no labels"
                    )
                    raise TraceError(f"{name}: no node has the label {label}; {named}")


def _node(row: Mapping[str, str]) -> FreeNode:
    return FreeNode(
        cpus=_whole(row, "cpu_milli"),
        memory_mib=_whole(row, "memory_mib"),
        devices=(WHOLE,) * _whole(row, "gpu", most=_MOST_DEVICES),
        kind=row["model"],
    )


def draw_jobs(pods: Sequence[FleetPod], requested: int, random: Random) -> Sequence[FleetPod]:
    """Return all jobs in random order, followed by jobs drawn from them at random, up to
    `requested` thousandths of accelerators."""
    jobs = list(pods)
    random.shuffle(jobs)
    total = sum(job.size for job in jobs)
    while total < requested:
        jobs.append(random.choice(pods))
        total += jobs[-1].size
    while total > requested:
        total -= jobs.pop().size
    return jobs


class PackingTrial(Struct, frozen=True, kw_only=True):
    """One run of one policy on one list of jobs."""

    name: str
    pods: Sequence[FleetPod]
    nodes: Sequence[FreeNode]
    labels: Sequence[Labels]
    policy: str
    seed: int


def find_lists(paths: Iterable[Path]) -> Sequence[Path]:
    """Return the given lists of jobs, and all lists of jobs in the given folders, sorted by name.
    Other CSV files in a folder are left out."""
    found: list[Path] = []
    for path in paths:
        found += filter(_is_list, sorted(path.glob("*.csv"))) if path.is_dir() else [path]
    if not found:
        raise TraceError(
            f"no list of jobs in {', '.join(map(str, paths))}; expected CSV files with the columns "
            f"{', '.join(_POD_COLUMNS)}"
        )
    return found


def pack_lists(
    lists: Mapping[str, Sequence[FleetPod]],
    nodes: Sequence[FreeNode],
    seeds: Sequence[int],
    processes: int = 1,
    labels: Sequence[Labels] = (),
) -> Sequence[PackedList]:
    """Fill the nodes with the jobs of each list, once for each policy and seed. `labels` are those
    of each node."""
    labels = labels or [()] * len(nodes)
    check_labels(lists, labels)
    trials = [
        PackingTrial(name=name, pods=pods, nodes=nodes, labels=labels, policy=policy, seed=seed)
        for name, pods in lists.items()
        for policy in POLICIES
        for seed in seeds
    ]
    runs = zip(trials, _run_all(trials, processes), strict=True)
    return [
        PackedList(
            jobs=name,
            policy=policy,
            percents=[points[-1][1] for _, points in found],
            curve=found[0][1],
        )
        for (name, policy), group in groupby(runs, key=lambda run: (run[0].name, run[0].policy))
        if (found := list(group))
    ]


def _run_all(trials: Sequence[PackingTrial], processes: int) -> Iterable[_Points]:
    if processes <= 1:
        return [run_trial(each) for each in trials]
    # The start method "fork" is unsafe with threads.
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        return list(pool.map(run_trial, trials))


def run_trial(trial: PackingTrial) -> _Points:
    """Fill the nodes once. Return up to about 200 points (requested, allocated) in percent of the
    cluster's accelerators; the last point is the result."""
    total = sum(sum(node.devices) for node in trial.nodes)
    random = Random(trial.seed)
    jobs = draw_jobs(trial.pods, int(DEMAND * total), random)
    typical = [pod.demand for pod in trial.pods for _ in range(pod.nodes)]
    place = POLICIES[trial.policy](typical, trial.nodes, random)
    place.labels = HostLabels(trial.labels)
    points = [(100 * asked / total, 100 * given / total) for asked, given in _fill(jobs, place)]
    return [*points[:: max(1, len(points) // _POINTS)], points[-1]]


def read_published(path: Path) -> Mapping[str, Mapping[str, float]]:
    """Read published results from a CSV file: the column `workload` contains the names of lists,
    and each other column the results of one policy in percent. Return them by list and policy.
    """
    return {
        row["workload"]: {
            policy: float(value)
            for column, value in row.items()
            if (policy := _PUBLISHED.get(column.partition("-")[2] or column))
        }
        for row in _rows(path, ("workload",))
    }


def _fill(jobs: Sequence[FleetPod], place: "_Placer") -> Iterator[tuple[int, int]]:
    """Place the jobs that fit, and yield what was requested and allocated so far."""
    asked = given = 0
    for job in jobs:
        asked += job.size
        placed = place.place(job.demand) if job.nodes == 1 else place.place_gang(job)
        given += job.size if placed else 0
        yield asked, given


class _Placer(Protocol):
    """A policy. It keeps what is free on the nodes."""

    labels: HostLabels

    def place(self, job: NodeDemand) -> bool: ...
    def place_gang(self, gang: FleetPod) -> bool: ...


def _place_gang(
    gang: FleetPod, nodes: list[FreeNode], labels: HostLabels, choose: Choose
) -> Sequence[int]:
    """Place a gang, and return its nodes, or () if it does not fit."""
    after = {
        at: choose(node, found)
        for at, node in enumerate(nodes)
        if (found := list_placements(node, gang.demand))
    }
    size, need = gang.nodes, gang.topology
    chosen = choose_hosts(labels, tuple(after), size, need, lambda at: after[at][0]) or ()
    for at in chosen:
        nodes[at] = after[at][1]
    return chosen


class _BestNode:
    """Places each job on the node with the lowest rate. For each demand, a heap keeps that node
    first; only nodes that were changed since the last job with the same demand are rated again.
    """

    def __init__(self, nodes: Sequence[FreeNode], choose: Choose) -> None:
        self._nodes, self._choose = list(nodes), choose
        self._changed = list(range(len(nodes)))
        self._read: Counter[NodeDemand] = Counter()
        self._heaps: dict[NodeDemand, list[tuple[float, int, FreeNode, FreeNode]]] = {}
        self.labels = HostLabels(())

    def place_gang(self, gang: FleetPod) -> bool:
        chosen = _place_gang(gang, self._nodes, self.labels, self._choose)
        self._changed += chosen
        return bool(chosen)

    def place(self, job: NodeDemand) -> bool:
        heap = self._heaps.setdefault(job, [])
        for index in set(self._changed[self._read[job] :]):
            before = self._nodes[index]
            if found := list_placements(before, job):
                rate, after = self._choose(before, found)
                heappush(heap, (rate, index, before, after))
        self._read[job] = len(self._changed)
        while heap:
            _, index, before, after = heappop(heap)
            if self._nodes[index] == before:
                self._nodes[index] = after
                self._changed.append(index)
                return True
        return False


class _RandomNode:
    """Places each job at random on one of the nodes where it fits."""

    def __init__(self, nodes: Sequence[FreeNode], random: Random) -> None:
        self._nodes, self._random = list(nodes), random
        self._fitting: dict[NodeDemand, list[int]] = {}
        self.labels = HostLabels(())

    def place_gang(self, gang: FleetPod) -> bool:
        def choose(before: FreeNode, found: Sequence[FreeNode]) -> tuple[float, FreeNode]:
            return self._random.random(), self._random.choice(found)

        return bool(_place_gang(gang, self._nodes, self.labels, choose))

    def place(self, job: NodeDemand) -> bool:
        left = self._fitting.setdefault(job, list(range(len(self._nodes))))
        while left:
            at = self._random.randrange(len(left))
            if found := list_placements(self._nodes[left[at]], job):
                self._nodes[left[at]] = self._random.choice(found)
                return True
            left[at] = left[-1]  # jobs do not end, so no later job with this demand fits there
            left.pop()
        return False


def _make_random(
    pods: Sequence[NodeDemand], nodes: Sequence[FreeNode], random: Random
) -> _RandomNode:
    return _RandomNode(nodes, random)


def _make_best_fit(
    pods: Sequence[NodeDemand], nodes: Sequence[FreeNode], random: Random
) -> _BestNode:
    """Return the policy that leaves least free on the node."""
    largest = find_largest(nodes)

    def choose(before: FreeNode, found: Sequence[FreeNode]) -> tuple[float, FreeNode]:
        return min((measure_free(after, largest), after) for after in found)

    return _BestNode(nodes, choose)


def _make_fgd(pods: Sequence[NodeDemand], nodes: Sequence[FreeNode], random: Random) -> _BestNode:
    """Return the policy of the paper. It knows the demands without memory, and rounds its scores;
    of the nodes with equal scores, the first one is taken."""
    typical = find_typical(job._replace(memory_mib=0) for job in pods)
    rater = PlacementRater(typical, find_largest(nodes))

    def choose(before: FreeNode, found: Sequence[FreeNode]) -> tuple[float, FreeNode]:
        growth, after = min((rater.measure_growth(before, after), after) for after in found)
        return -int(_SCORES / (1 + exp(growth / WHOLE))), after

    return _BestNode(nodes, choose)


def _make_cavvy(pods: Sequence[NodeDemand], nodes: Sequence[FreeNode], random: Random) -> _BestNode:
    """Return the policy that places jobs on shared hosts in production."""
    rater = PlacementRater(find_typical(pods), find_largest(nodes))

    def choose(before: FreeNode, found: Sequence[FreeNode]) -> tuple[float, FreeNode]:
        return min((rater.rate(before, after), after) for after in found)

    return _BestNode(nodes, choose)


POLICIES: Mapping[str, Callable[..., _Placer]] = {
    "random": _make_random,
    "best fit": _make_best_fit,
    "FGD": _make_fgd,
    "cavvy": _make_cavvy,
}


def _is_list(path: Path) -> bool:
    with path.open(newline="") as file:
        return set(_POD_COLUMNS) <= set(next(csv.reader(file), ()))


def _rows(path: Path, columns: Sequence[str]) -> Iterator[Mapping[str, str]]:
    """Yield the rows of a CSV file. Raises TraceError for a row that cannot be read, also while
    the caller reads the row."""
    with path.open(newline="") as file:
        rows = csv.DictReader(file)
        if lacking := [column for column in columns if column not in (rows.fieldnames or ())]:
            raise TraceError(
                f"{path}: the file has no column {' and no '.join(lacking)}; expected the columns "
                f"{', '.join(columns)}"
            )
        yield from rows


def _read(path: Path, columns: Sequence[str], read: Callable[[Mapping[str, str]], _T]) -> list[_T]:
    """Read each row of a CSV file. Raises TraceError if a row cannot be read or there is none."""
    found = []
    for number, row in enumerate(_rows(path, columns), start=2):
        try:
            found.append(read(row))
        except (TypeError, ValueError, AttributeError) as error:
            raise TraceError(f"{path}:{number}: {error}") from None
    if not found:
        raise TraceError(f"{path}: the file has no rows; expected one row for each job or node")
    return found


def _whole(row: Mapping[str, str], column: str, least: int = 0, most: int = _MOST) -> int:
    text = row[column] or ""
    if not (text.isdecimal() and least <= int(text) <= most):
        raise ValueError(f"{column}: expected a whole number from {least} to {most}, not {text!r}")
    return int(text)

"""The rules of schedulers that know types of GPUs, as the simulator of Sia (SOSP'23) applies them:
Gavel (OSDI'20, the policy "max sum throughput") and Sia. Both solve a program at each interval,
here with HiGHS by SciPy.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import lil_matrix

from cavvy.domain.elastic import ElasticSize
from elastic_cluster.cluster import Cluster, Place, Run
from elastic_cluster.ours import SizeTable
from elastic_cluster.rules import fill

_EPS = 1e-8
_LEAST = 1e-4  # what a size is worth that a job can't have


class Gavel:
    """Each job has the GPUs that it asks for, of one type at a time. A linear program says which
    part of the time it should have them; those that had the least of it are first."""

    def __init__(self, interval: float):
        self.interval = interval
        self.received: dict[str, dict[str, float]] = {}
        self.total: dict[str, float] = {}
        self.placed: dict[str, tuple[str, tuple[int, ...]]] = {}

    def __call__(self, now: float, jobs: Sequence[Run], cluster: Cluster) -> Mapping[str, Place]:
        kinds = list(cluster)
        for job in jobs:
            if job.name not in self.received:
                self.received[job.name] = dict.fromkeys(kinds, self.interval / 2)
                for kind in kinds:
                    self.total[kind] = self.total.get(kind, 0.0) + self.interval / 2
        parts = self._divide(jobs, cluster)
        queue = []
        for kind in kinds:
            for job in jobs:
                part = parts[job.name][kind]
                share = self.received[job.name][kind] / self.total[kind]
                queue.append((part / share if part else 0.0, part, kind, job))
        queue.sort(key=lambda each: each[:2], reverse=True)
        left = {kind: cluster[kind].total for kind in kinds}
        chosen: dict[str, list[tuple[str, int]]] = {kind: [] for kind in kinds}
        seen = set()
        for _, _, kind, job in queue:
            if job.name not in seen and job.asked <= left[kind]:
                seen.add(job.name)
                left[kind] -= job.asked
                chosen[kind].append((job.name, job.asked))
        self._assign(chosen, cluster)
        for name, (kind, _) in self.placed.items():
            self.received[name][kind] += self.interval
            self.total[kind] += self.interval
        return {
            name: Place(kind, tuple(gpu // cluster[kind].gpus for gpu in gpus))
            for name, (kind, gpus) in self.placed.items()
        }

    def _divide(self, jobs: Sequence[Run], cluster: Cluster) -> dict[str, dict[str, float]]:
        """The part of the time for each job and type that makes the most throughput."""
        kinds, count = list(cluster), len(jobs)
        speeds = np.array([[self._speed(job, k, cluster) for k in kinds] for job in jobs])
        rows = lil_matrix((count + len(kinds), count * len(kinds)))
        for number, job in enumerate(jobs):
            for at in range(len(kinds)):
                rows[number, number * len(kinds) + at] = 1
                rows[count + at, number * len(kinds) + at] = job.asked
        most = [1.0] * count + [float(cluster[kind].total) for kind in kinds]
        found = linprog(-speeds.ravel(), A_ub=rows.tocsr(), b_ub=most, bounds=(0, 1))
        parts = np.round(found.x, 5).reshape(count, len(kinds))
        return {
            job.name: dict(zip(kinds, map(float, parts[number]), strict=True))
            for number, job in enumerate(jobs)
        }

    def _speed(self, job: Run, kind: str, cluster: Cluster) -> float:
        """Steps per second; nearly none where the job is larger than the type."""
        profile, machines = job.profiles[kind], cluster[kind]
        if job.asked > machines.total:
            return 0.1
        shape = fill(job.asked, machines.gpus)
        local = math.ceil(job.batch / job.asked - _EPS)
        parts = math.ceil(local / profile.part_limit(shape) - _EPS)
        if job.asked == 1:
            parts = max(parts, 2)
        part = math.ceil(local / parts - _EPS)
        part = min(part, profile.most_batch // (job.asked * parts))
        steps = profile.steps(shape, part)
        if steps is None:
            return 0.1
        return 1 / (steps[0] + (steps[0] - steps[1]) * (parts - 1)) / job.slowdown

    def _assign(self, chosen: Mapping[str, list[tuple[str, int]]], cluster: Cluster) -> None:
        """Choose GPUs, the largest jobs first; of equal ones those first that keep their own."""
        placed: dict[str, tuple[str, tuple[int, ...]]] = {}
        for kind, named in chosen.items():
            used: set[int] = set()
            for size in sorted({count for _, count in named}, reverse=True):
                same = [name for name, count in named if count == size]
                for name in same:
                    before = self.placed.get(name)
                    if before and before[0] == kind and not used & set(before[1]):
                        placed[name] = before
                        used |= set(before[1])
                for name in same:
                    if name not in placed:
                        free = [g for g in range(cluster[kind].total) if g not in used][:size]
                        placed[name] = kind, tuple(free)
                        used |= set(free)
        self.placed = placed


class Sia:
    """An integer program over all sizes of all jobs: the least sum of goodputs to the power -0.5,
    each relative to the job's least one, where a change is worth less to a job that has restarted
    often for its age, and each job without GPUs costs 1.1."""

    power, waiting, clip = -0.5, 1.1, 3000.0

    def __init__(self, table: SizeTable):
        self.table = table

    def __call__(self, now: float, jobs: Sequence[Run], cluster: Cluster) -> Mapping[str, Place]:
        options: list[tuple[int, ElasticSize, float]] = []
        kept = []
        for number, job in enumerate(jobs):
            sizes = self.table.list_sizes(job, cluster)
            slowest = min(each.goodput for each in sizes)
            age = now - job.submitted
            lost = (job.restarts or 0) * job.restart_s
            factor = max(age - lost, 0.0) / (age + job.restart_s)
            factor = 1.0 if age < job.restart_s else factor
            for size in sizes:
                same = job.place is not None and is_current(job, size)
                value = size.goodput / slowest
                if job.place is not None and not same:
                    value *= factor
                if same and job.wait_s > 0:
                    kept.append(len(options))  # it restarts just now
                cost = min(round(max(value, _LEAST) ** self.power, 2), self.clip)
                options.append((number, size, cost - self.waiting))
        return place_fast(jobs, self._solve(len(jobs), options, kept, cluster), cluster)

    def _solve(
        self,
        count: int,
        options: Sequence[tuple[int, ElasticSize, float]],
        kept: Sequence[int],
        cluster: Cluster,
    ) -> Mapping[int, ElasticSize]:
        kinds = list(cluster)
        rows = lil_matrix((count + len(kinds), len(options)))
        for at, (number, size, _) in enumerate(options):
            assert size.accelerator is not None
            rows[number, at] = 1
            rows[count + kinds.index(size.accelerator), at] = size.accelerators
        most = [1.0] * count + [float(cluster[kind].total) for kind in kinds]
        low = np.zeros(len(options))
        low[list(kept)] = 1
        found = milp(
            np.array([cost for _, _, cost in options]),
            constraints=LinearConstraint(rows.tocsr(), -np.inf, most),
            integrality=np.ones(len(options)),
            bounds=Bounds(low, 1),
            options={"mip_rel_gap": 1e-4},
        )
        return {
            number: size
            for (number, size, _), value in zip(options, found.x, strict=True)
            if value > 0.5
        }


def is_current(job: Run, size: ElasticSize) -> bool:
    place = job.place
    return (
        place is not None
        and place.kind == size.accelerator
        and len(place.nodes) == size.accelerators
    )


def place_fast(
    jobs: Sequence[Run], sizes: Mapping[int, ElasticSize], cluster: Cluster
) -> Mapping[str, Place]:
    """Place all jobs anew, the largest first: whole nodes, then what is left node by node."""
    places: dict[str, Place] = {}
    for kind, machines in cluster.items():
        free, at = [machines.gpus] * machines.nodes, 0
        order = [(n, s) for n, s in sizes.items() if s.accelerator == kind]
        for number, size in sorted(order, key=lambda each: -each[1].accelerators):
            need, nodes, node = size.accelerators, list[int](), at
            whole, tried = need // machines.gpus, 0
            while whole and tried < machines.nodes:
                if free[node] == machines.gpus:
                    nodes += [node] * machines.gpus
                    free[node], whole, need = 0, whole - 1, need - machines.gpus
                node, tried = (node + 1) % machines.nodes, tried + 1
            while need:
                taken = min(need, free[node])
                nodes += [node] * taken
                free[node], need = free[node] - taken, need - taken
                node = (node + 1) % machines.nodes
            at = node
            places[jobs[number].name] = Place(kind, tuple(nodes))
    return places

"""The rules of other schedulers, as their authors' simulators apply them: Tiresias (NSDI'19) and
Optimus (EuroSys'18), both with jobs whose sizes were tuned, Gavel (OSDI'20), Pollux (OSDI'21) and
Sia (SOSP'23).
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from elastic_cluster.cluster import Cluster, Place, Run

_EPS = 1e-8


class Tiresias:
    """Two queues by attained service: jobs above 16 GPU-hours are behind all others, and each queue
    is first come, first served. A job has all GPUs that it asks for, or none."""

    demoted_s = 16 * 3600

    def __init__(self, kind: str):
        self.kind = kind
        self.queues: tuple[list[str], list[str]] = [], []
        self.running: dict[str, bool] = {}
        self.executed: dict[str, float] = {}
        self.last = 0.0

    def __call__(self, now: float, jobs: Sequence[Run], cluster: Cluster) -> Mapping[str, Place]:
        by_name = {job.name: job for job in jobs}
        for queue in self.queues:
            queue[:] = [name for name in queue if name in by_name]
        for job in jobs:
            if job.name not in self.running:
                self.running[job.name], self.executed[job.name] = False, 0.0
                self.queues[0].append(job.name)
            elif self.running[job.name]:
                self.executed[job.name] += now - self.last
                service = self.executed[job.name] * job.asked
                if job.name in self.queues[0] and service >= self.demoted_s:
                    self.queues[0].remove(job.name)
                    self.queues[1].append(job.name)
        self.last = now
        free = cluster[self.kind].total
        order = [name for queue in self.queues for name in queue]
        for name in order:
            self.running[name] = by_name[name].asked <= free
            free -= by_name[name].asked if self.running[name] else 0
        kept = {n: by_name[n].place for n in order if self.running[n] and by_name[n].place}
        sizes = {name: by_name[name].asked for name in order if self.running[name]}
        return spread(sizes, kept, cluster, self.kind)


class Optimus:
    """Each job has one GPU, and more go where they shorten the remaining time of a job most, by its
    known times and remaining steps (an oracle)."""

    def __init__(self, kind: str):
        self.kind = kind

    def __call__(self, now: float, jobs: Sequence[Run], cluster: Cluster) -> Mapping[str, Place]:
        by_name = {job.name: job for job in jobs}
        free = cluster[self.kind].total
        sizes: dict[str, int] = {}
        gains: dict[str, float] = {}
        for job in jobs:
            sizes[job.name] = 1 if free else 0
            if free:
                free -= 1
                gains[job.name] = self._gain(job, 1) if free else 0.0
            else:
                gains[job.name] = 0.0
        while free > 0 and max(gains.values()) > 0:
            name = max(gains, key=lambda each: gains[each])
            sizes[name] += 1
            free -= 1
            gains[name] = self._gain(by_name[name], sizes[name])
            if free < 0:
                gains[name] = 0.0
        order = sorted(sizes, key=lambda name: sizes[name])
        kept = {
            name: place
            for name in order
            if (place := by_name[name].place) and len(place.nodes) == sizes[name]
        }
        return spread(
            {name: sizes[name] for name in order if sizes[name]}, kept, cluster, self.kind
        )

    def _gain(self, job: Run, size: int) -> float:
        most = job.limit or job.batch // job.profiles[self.kind].least_part
        if size + 1 > most:
            return 0.0
        profile = job.profiles[self.kind]
        last = profile.epochs - 1
        left = 1.0
        if last > job.epoch:
            left = profile.iterations(job.batch, last) - profile.iterations(job.batch, job.epoch)
        return (self._step(job, size) - self._step(job, size + 1)) * left

    def _step(self, job: Run, size: int) -> float:
        profile = job.profiles[self.kind]
        shape = fill(size, 4)
        local = math.ceil(job.batch / size - _EPS)
        parts = math.ceil(local / profile.most_part - _EPS)
        if size == 1:
            parts = max(parts, 2)
        part = math.ceil(local / parts - _EPS)
        part = min(part, profile.most_batch // (size * parts))
        steps = profile.steps(shape, part)
        assert steps is not None
        return steps[0] + (steps[0] - steps[1]) * (parts - 1)


def fill(size: int, gpus: int) -> tuple[int, ...]:
    """So many GPUs on as few nodes as possible."""
    full, rest = divmod(size, gpus)
    return (gpus,) * full + ((rest,) if rest else ())


def spread(
    sizes: Mapping[str, int], kept: Mapping[str, Place], cluster: Cluster, kind: str
) -> Mapping[str, Place]:
    """Place jobs in this order, each on the nodes with the most free GPUs; `kept` stay."""
    machines = cluster[kind]
    free = Counter({node: machines.gpus for node in range(machines.nodes)})
    places = dict(kept)
    for place in kept.values():
        free.subtract(place.nodes)
    for name, size in sizes.items():
        if name in places:
            continue
        nodes: list[int] = []
        while len(nodes) < size:
            node, count = max(free.items(), key=lambda each: each[1])
            count = min(count, size - len(nodes))
            nodes.extend([node] * count)
            free[node] -= count
        places[name] = Place(kind, tuple(nodes))
    return places

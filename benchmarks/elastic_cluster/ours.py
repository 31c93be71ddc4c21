"""Cavvy's own choice of sizes in the simulated cluster: `cavvy.scheduler.goodput` with the goodput
that jobs of a program have measured so far, and the nodes on which they then run.
"""

from collections.abc import Mapping, Sequence

from cavvy.domain.elastic import ElasticJob, ElasticSize
from cavvy.domain.goodput import StepTimes, find_batch, guess_step_times
from cavvy.scheduler.goodput import GrowthRules, Room, choose_sizes
from elastic_cluster.cluster import Cluster, Machines, Place, Run
from elastic_cluster.rules import fill


class SizeTable:
    """The sizes of jobs: powers of two in a node, whole nodes above that, and at most twice as many
    replicas as were measured so far, so that what is unknown is tried step by step. What was not
    measured on a type of GPU is guessed from another type, by the known speed of one replica."""

    def __init__(self, growth: int = 2):
        self.growth = growth
        self.known: dict[object, list[ElasticSize]] = {}

    def list_sizes(self, job: Run, cluster: Cluster) -> list[ElasticSize]:
        return [s for kind, machines in cluster.items() for s in self._list(job, kind, machines)]

    def _list(self, job: Run, kind: str, machines: Machines) -> list[ElasticSize]:
        memory, profile = job.memory, job.profiles[kind]
        speeds = {each: one.speed for each, one in job.profiles.items()}
        times = guess_step_times(memory.times, kind, speeds)
        if times is None:
            return [_size(kind, 1, 1, speeds[kind])]
        tried = max(memory.most_replicas(each) for each in job.profiles)
        most = min(machines.total, profile.most_batch // profile.least_part, tried * self.growth)
        most = min(most, job.limit or most)
        noise = job.noise or memory.noise.get(job.epoch) or memory.noise.get(0)
        key = job.program, kind, times, noise, most, job.tuned or job.batch
        if key not in self.known:
            self.known[key] = self._measure(job, kind, machines, times, most)
        return self.known[key]

    def _measure(
        self, job: Run, kind: str, machines: Machines, times: StepTimes, most: int
    ) -> list[ElasticSize]:
        noise = job.noise or job.memory.noise.get(job.epoch) or job.memory.noise.get(0)
        found = []
        inside = [(1, 2**n) for n in range(machines.gpus.bit_length())]
        for nodes, gpus in inside + [(n, machines.gpus) for n in range(2, machines.nodes + 1)]:
            replicas = nodes * gpus
            if replicas > most:
                continue
            limits = job.limits(fill(replicas, machines.gpus), kind)
            batch = find_batch(times, noise, limits, nodes, replicas)
            if batch is not None:
                found.append(_size(kind, nodes, gpus, batch.goodput))
        return found


class Goodput:
    """`knows_length`: jobs tell how much work they have left."""

    def __init__(self, rules: GrowthRules | None = None, knows_length: bool = True):
        self.rules, self.knows_length = rules or GrowthRules(), knows_length
        self.table = SizeTable()

    def __call__(self, now: float, jobs: Sequence[Run], cluster: Cluster) -> Mapping[str, Place]:
        asked = [self._describe(job, cluster) for job in jobs]
        room = Room(free={kind: machines.total for kind, machines in cluster.items()})
        return place_steadily(jobs, choose_sizes(asked, room, self.rules), cluster)

    def _describe(self, job: Run, cluster: Cluster) -> ElasticJob:
        sizes = self.table.list_sizes(job, cluster)
        place, profile = job.place, job.profile
        current = None
        if place is not None:
            same = [s for s in sizes if s.accelerator == place.kind]
            current = next((s for s in same if s.accelerators == len(place.nodes)), None)
        left = (profile.total - job.progress) * profile.least_batch
        return ElasticJob(
            id=job.name,
            sizes=tuple(sizes),
            current=current,
            resize_s=job.restart_s,
            remaining=left if self.knows_length else None,
            done=job.progress * profile.least_batch,
        )


def _size(kind: str, nodes: int, gpus: int, goodput: float) -> ElasticSize:
    return ElasticSize(
        nodes=nodes, accelerator=kind, accelerators_per_node=gpus, throughput=goodput
    )


def place_steadily(
    jobs: Sequence[Run], sizes: Mapping[str, ElasticSize], cluster: Cluster
) -> Mapping[str, Place]:
    """Jobs whose size stays keep their GPUs. The others are placed, the largest first, on the node
    with the least room, or on as few nodes as possible."""
    places: dict[str, Place] = {}
    free = {kind: [each.gpus] * each.nodes for kind, each in cluster.items()}
    waiting = []
    for job in sorted(jobs, key=lambda each: -_count(sizes, each)):
        size, place = sizes.get(job.name), job.place
        if size is None:
            continue
        kind, count = size.accelerator, size.accelerators
        if place is not None and (place.kind, len(place.nodes)) == (kind, count):
            places[job.name] = place
            for node in place.nodes:
                free[place.kind][node] -= 1
        else:
            waiting.append((job.name, size))
    for name, size in waiting:
        assert size.accelerator is not None
        room, need, nodes = free[size.accelerator], size.accelerators, list[int]()
        while need:
            fits = [node for node, count in enumerate(room) if count >= need]
            node = min(fits, key=room.__getitem__) if fits else room.index(max(room))
            taken = min(need, room[node])
            nodes += [node] * taken
            room[node], need = room[node] - taken, need - taken
        places[name] = Place(size.accelerator, tuple(nodes))
    return places


def _count(sizes: Mapping[str, ElasticSize], job: Run) -> int:
    return sizes[job.name].accelerators if job.name in sizes else 0

"""A cluster in virtual time: jobs make the progress that the authors' profiles state, and a rule
says at every interval which GPUs each job has. What a job does between two decisions is what the
published simulators of Pollux (OSDI'21) and Sia (SOSP'23) do, so that figures can be compared:
* a job that gets other GPUs makes no progress for the seconds of its restart,
* progress, gradients and epochs follow the profile, seconds are rounded at the end of an epoch,
* the rule sees only what a job has measured so far, unless it says otherwise.
"""

import csv
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cavvy.domain.goodput import (
    BatchLimits,
    GradientNoise,
    StepSeen,
    StepTimes,
    find_batch,
    fit_step_times,
)
from elastic_cluster.profiles import Profile

_EPS = 1e-8


@dataclass(frozen=True)
class Place:
    """The GPUs of a job: their type, and the number of the node of each."""

    kind: str
    nodes: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """How many GPUs on each node."""
        counts: list[int] = []
        last = None
        for node in self.nodes:
            if node == last:
                counts[-1] += 1
            else:
                counts.append(1)
            last = node
        return tuple(counts)


@dataclass
class Memory:
    """What all jobs of one program have measured."""

    seen: dict[str, dict[tuple[int, int, int], StepSeen]] = field(default_factory=dict)
    times: dict[str, StepTimes] = field(default_factory=dict)
    noise: dict[int, GradientNoise] = field(default_factory=dict)  # by epoch

    def add(self, kind: str, seen: StepSeen) -> None:
        points = self.seen.setdefault(kind, {})
        key = seen.nodes, seen.replicas, seen.samples
        if key not in points:
            points[key] = seen
            self.times[kind] = fit_step_times(list(points.values()))

    def most_replicas(self, kind: str) -> int:
        return max((each.replicas for each in self.seen.get(kind, {}).values()), default=0)


@dataclass
class Run:
    """A job. `asked` and `batch` are the GPUs and the batch of its file, `tuned` whether it may
    choose its batch, `limit` how many GPUs it may have."""

    name: str
    profiles: Mapping[str, Profile]
    submitted: float
    asked: int
    batch: int
    restart_s: float = 30.0
    slowdown: float = 1.0
    tuned: bool = True
    memory: Memory = field(default_factory=Memory)
    limit: int | None = None
    place: Place | None = None
    part: int = 0
    parts: int = 1
    progress: float = 0.0
    epoch: int = 0
    wait_s: float = 0.0
    service: float = 0.0  # GPU-seconds
    running_s: float = 0.0
    restarts: int | None = None
    finished: float | None = None
    measures: bool = True
    noise: GradientNoise | None = None

    @property
    def program(self) -> str:
        return next(iter(self.profiles.values())).name

    @property
    def profile(self) -> Profile:
        kind = self.place.kind if self.place else next(iter(self.profiles))
        return self.profiles[kind]

    def move(self, place: Place | None, always: bool) -> None:
        """Give the job other GPUs. `always`: it restarts even if only the nodes are others."""
        before, self.place = self.place, place
        if place is None:
            return
        same = before is not None and before.kind == place.kind and before.shape == place.shape
        if same and not always:
            return
        self.wait_s = self.restart_s
        self.restarts = 0 if self.restarts is None else self.restarts + 1
        self.tune()

    def limits(self, shape: tuple[int, ...], kind: str) -> BatchLimits:
        profile = self.profiles[kind]
        return BatchLimits(
            least=profile.least_batch,
            most=profile.most_batch,
            part_least=profile.least_part,
            part_most=profile.part_limit(shape),
        )

    def tune(self) -> None:
        """Choose the batch for the current GPUs."""
        if self.place is None:
            return
        shape, profile = self.place.shape, self.profile
        replicas, most = sum(shape), profile.part_limit(shape)
        batch = None if self.tuned else self.batch
        times = self.memory.times.get(self.place.kind)
        if batch is None and (times is None or self.noise is None):
            batch = max(profile.least_batch, profile.least_part * replicas)
        if batch is None:
            assert times is not None
            limits = self.limits(shape, self.place.kind)
            best = find_batch(times, self.noise, limits, len(shape), replicas)
            assert best is not None, (self.name, shape)
            self.part, self.parts = best.samples, best.parts
        else:
            local = math.ceil(batch / replicas - _EPS)
            self.parts = math.ceil(local / most - _EPS)
            if replicas == 1 and batch > profile.least_batch:
                self.parts = max(self.parts, 2)
            self.part = math.ceil(local / self.parts - _EPS)
        if profile.per_placement and (measured := profile.measured_limit(replicas)):
            self.part = min(self.part, measured)
        self.part = min(self.part, profile.most_batch // (replicas * self.parts))

    def step(self, now: float, seconds: float) -> None:
        """Train for so many seconds from `now`."""
        if self.place is None or self.finished is not None:
            return
        shape = self.place.shape
        gpus = sum(shape)
        delay = min(self.wait_s, seconds)
        self.wait_s -= delay
        now, seconds = now + delay, seconds - delay
        self.service += delay * gpus
        while seconds > 0 and self.finished is None:
            speed = self._speed(shape)
            goal = self.profile.progress(self.epoch + 1)
            if self.progress + speed * seconds < goal:
                self.progress += speed * seconds
                used = seconds
            else:
                used = float(round((goal - self.progress) / speed))
                self.epoch += 1
                self.progress = goal
                if self.epoch >= self.profile.epochs:
                    self.finished = now + used
            self.service += used * gpus
            self.running_s += used
            now, seconds = now + used, seconds - used
            self.tune()

    def _speed(self, shape: tuple[int, ...]) -> float:
        """Progress per second, and what the job measures of it."""
        assert self.place is not None
        profile, replicas = self.profile, sum(shape)
        batch = replicas * self.part * self.parts
        steps = profile.steps(shape, self.part)
        assert steps is not None, (self.name, self.place.kind, shape, self.part)
        step, sync = steps
        square, variance = profile.gradients(batch, self.epoch)
        scale = batch / profile.least_batch
        gain = (variance + square) / (variance / scale + square)
        if self.measures:
            noise = GradientNoise(batch=profile.least_batch, square=square, variance=variance)
            self.noise = self.memory.noise[self.epoch] = noise
            seen = StepSeen(
                nodes=len(shape),
                replicas=replicas,
                samples=self.part,
                part_s=step - sync,
                step_s=step,
            )
            self.memory.add(self.place.kind, seen)
        return gain / (step + (step - sync) * (self.parts - 1)) / self.slowdown


@dataclass(frozen=True)
class Machines:
    """So many nodes of one type of GPU."""

    nodes: int
    gpus: int

    @property
    def total(self) -> int:
        return self.nodes * self.gpus


Cluster = Mapping[str, Machines]
Rule = Callable[[float, Sequence[Run], Cluster], Mapping[str, Place]]


def simulate(
    jobs: Sequence[Run], cluster: Cluster, rule: Rule, interval: float, always: bool
) -> dict[str, float]:
    """Run all jobs, and return the GPU-seconds that each held. `always`: a job restarts when its
    nodes change, not only when their type or shape does."""
    now, held = 0.0, {each.name: 0.0 for each in jobs}
    going = list(jobs)
    while going:
        for job in going:
            job.step(now, interval)
        now += interval
        going = [each for each in going if each.finished is None]
        active = [each for each in going if each.submitted <= now]
        if not active:
            continue
        places = rule(now, active, cluster)
        check(places, cluster)
        for job in active:
            if (place := places.get(job.name)) != job.place:
                job.move(place, always)
            if job.place is not None:
                held[job.name] += len(job.place.nodes) * interval
    return held


def check(places: Mapping[str, Place], cluster: Cluster) -> None:
    """Raise AssertionError if a node has more jobs than GPUs."""
    used: dict[tuple[str, int], int] = {}
    for place in places.values():
        for node in place.nodes:
            used[place.kind, node] = used.get((place.kind, node), 0) + 1
    for (kind, node), count in used.items():
        assert node < cluster[kind].nodes, (kind, node)
        assert count <= cluster[kind].gpus, (kind, node, count)


def read_workload(path: Path) -> Iterable[tuple[str, float, str, int, int]]:
    """The name, submission, program, GPUs and batch of each job."""
    with path.open() as file:
        for row in csv.DictReader(file):
            yield (
                row["name"],
                float(row["time"]),
                row["application"],
                int(row["num_replicas"]),
                int(row["batch_size"]),
            )

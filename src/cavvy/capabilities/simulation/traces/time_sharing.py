"""Runs a recorded list of jobs in one pool of GPUs that several projects share. The production code
that gives projects their turns (`scheduler.shares`) decides which jobs run; a job that loses its
turn saves a checkpoint, and repeats some work when it continues.

No policy here knows how long a job will run, except `SHORTEST`. Jobs are ordered by their Gittins
index, which is computed from the GPU-hours of earlier jobs of the same project and size, in
discrete steps: Gu et al., "Tiresias: A GPU Cluster Manager for Distributed Deep Learning" (NSDI
2019), section 3.2.
"""

from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from math import sqrt

from cavvy.capabilities.simulation.traces.fleet import TraceArrival
from cavvy.domain.shares import QueueRow
from cavvy.domain.values import Struct
from cavvy.scheduler.shares import ShareBook, ShareRule, give_turns

_HOUR_S = 3600.0
_PASS_S = 300.0  # time between two passes while jobs wait
# GPU-hours at which a job enters the next step
_STEPS_H = tuple(2.0**power for power in range(-4, 13))
_PRIOR = 10.0  # how many jobs of its own project and size outweigh all other jobs
FIFO, SHORTEST, SHARED = "first in, first out", "shortest first, known in advance", "cavvy"


class SharedResult(Struct, frozen=True, kw_only=True):
    """The result of one policy. `times_h` are the times from the submission to the end of each job.
    `below_share` is how often a job waited in a pass although its project would not exceed its
    share with it; None if the policy knows no shares.
    """

    policy: str
    times_h: Sequence[float]
    left_out: int
    preemptions: int = 0
    below_share: int | None = None

    @property
    def mean_h(self) -> float:
        return sum(self.times_h) / len(self.times_h) if self.times_h else 0.0


def compare_sharing(
    jobs: Sequence[TraceArrival], pools: Mapping[str, int], gpus: int, resume_s: float
) -> Sequence[SharedResult]:
    """Run the jobs by each policy. Each project's share of the GPUs is proportional to its size in
    `pools`. A preempted job repeats `resume_s` of work. Jobs larger than the pool, and those of
    unknown projects, are left out."""
    kept = [each for each in jobs if each.gpus <= gpus and pools.get(each.pool)]
    left_out = len(jobs) - len(kept)
    orders: Mapping[str, Callable[[TraceArrival], float]] = {
        FIFO: lambda job: job.arrival_s,
        SHORTEST: lambda job: job.duration_s,
    }
    results = [
        SharedResult(
            policy=policy, times_h=list(_run_in_order(kept, gpus, order)), left_out=left_out
        )
        for policy, order in orders.items()
    ]
    shared = _SharedPool(pools, gpus, resume_s)
    times_h = list(shared.run(kept))
    return [
        *results,
        SharedResult(
            policy=SHARED,
            times_h=times_h,
            left_out=left_out,
            preemptions=shared.preemptions,
            below_share=shared.below_share,
        ),
    ]


def _run_in_order(
    jobs: Sequence[TraceArrival], gpus: int, order: Callable[[TraceArrival], float]
) -> Iterator[float]:
    """Yield the time of each job if the waiting jobs start in this order, none passes the first,
    and none is preempted."""
    free, waiting, ends, at = gpus, list[tuple[float, int]](), list[tuple[float, int]](), 0
    while at < len(jobs) or ends:
        if at < len(jobs) and (not ends or jobs[at].arrival_s < ends[0][0]):
            now = jobs[at].arrival_s
            heappush(waiting, (order(jobs[at]), at))
            at += 1
        else:
            now, size = heappop(ends)
            free += size
        while waiting and (job := jobs[waiting[0][1]]).gpus <= free:
            heappop(waiting)
            free -= job.gpus
            heappush(ends, (now + job.duration_s, job.gpus))
            yield (now + job.duration_s - job.arrival_s) / _HOUR_S


class _Work(Struct):
    """A job in the pool. `repeat_s` is the work that it must repeat before it makes progress."""

    job: TraceArrival
    left_s: float
    used_h: float = 0.0
    repeat_s: float = 0.0
    runs: bool = False


class _History:
    """The GPU-hours of the jobs that have ended, by project and size."""

    def __init__(self) -> None:
        self._all = [1.0] * (len(_STEPS_H) + 1)
        self._ended: defaultdict[tuple[str, int], list[int]] = defaultdict(
            lambda: [0] * (len(_STEPS_H) + 1)
        )
        self._indices: dict[tuple[str, int], Sequence[float]] = {}

    def add(self, work: _Work) -> None:
        """Count a job that has ended."""
        step, kind = bisect(_STEPS_H, work.used_h), (work.job.pool, work.job.gpus)
        self._all[step] += 1
        self._ended[kind][step] += 1
        if sum(self._ended[kind]) % 20 == 0:
            self._indices.pop(kind, None)

    def find_index(self, work: _Work) -> float:
        """Return the Gittins index of the job: the highest chance of ending per GPU-hour, over all
        numbers of further steps that it could be given."""
        kind = work.job.pool, work.job.gpus
        if kind not in self._indices:
            known = sum(self._all)
            counts = [
                own + _PRIOR * every / known
                for own, every in zip(self._ended[kind], self._all, strict=True)
            ]
            self._indices[kind] = [_compute_index(counts, step) for step in range(len(counts))]
        return self._indices[kind][bisect(_STEPS_H, work.used_h)]


def _compute_index(counts: Sequence[float], first: int) -> float:
    """Return the index in the step `first`. `counts` are how many jobs ended in each step."""
    edges = (0.0, *_STEPS_H, 2 * _STEPS_H[-1])
    begin, best = edges[first], 0.0
    left, ended, spent = sum(counts[first:]), 0.0, 0.0
    for step in range(first, len(counts)):
        middle = sqrt(max(edges[step], edges[step + 1] / 2) * edges[step + 1])
        ended += counts[step]
        left -= counts[step]
        spent += counts[step] * (middle - begin)
        best = max(best, ended / (spent + left * (edges[step + 1] - begin)))
    return best


class _SharedPool:
    def __init__(self, pools: Mapping[str, int], gpus: int, resume_s: float) -> None:
        total = sum(pools.values())
        self._shares = {name: gpus * size / total for name, size in pools.items()}
        self._book = ShareBook(
            parents=dict.fromkeys(pools, ""),
            rules={
                name: ShareRule(weight=pools[name], quota=quota)
                for name, quota in self._shares.items()
            },
        )
        self._gpus, self._resume_s = gpus, resume_s
        self._work: dict[str, _Work] = {}
        self._held: Counter[str] = Counter()
        self._history = _History()
        self.preemptions = self.below_share = 0

    def run(self, jobs: Sequence[TraceArrival]) -> Iterator[float]:
        """Yield the time of each job."""
        at, now = 0, 0.0
        while at < len(jobs) or self._work:
            if not self._work:
                now = max(now, jobs[at].arrival_s)
            while at < len(jobs) and jobs[at].arrival_s <= now:
                self._work[str(at)] = _Work(jobs[at], jobs[at].duration_s)
                at += 1
            full = self._give_turns()
            until = self._find_next(jobs, at, now, full)
            yield from self._advance(now, until)
            now = until

    def _give_turns(self) -> bool:
        """Decide which jobs run now. Return whether a job waits."""
        if sum(each.job.gpus for each in self._work.values()) <= self._gpus:
            chosen = set(self._work)
        else:
            chosen = self._choose()
        self._held.clear()
        for name, each in self._work.items():
            if each.runs and name not in chosen:
                each.repeat_s = self._resume_s
                self.preemptions += 1
            each.runs = name in chosen
            self._held[each.job.pool] += each.job.gpus if each.runs else 0
        return len(chosen) < len(self._work)

    def _choose(self) -> set[str]:
        """Return the jobs that run. Jobs with which their projects do not exceed their shares come
        first; what is left goes to the other jobs, by their indices. Of jobs with the same index,
        those that run already come first, so that equal jobs do not preempt each other."""
        order = sorted(self._work, key=self._rank)
        rows = [
            QueueRow(name, work.job.pool, "", float(work.job.gpus))
            for name in order
            if (work := self._work[name])
        ]
        free, chosen = self._gpus, set[str]()
        held: Counter[str] = Counter()
        for turn in give_turns(rows, self._book):
            project, size = turn.row.project, int(turn.row.size)
            if held[project] + size > self._shares[project]:
                break  # this and all later turns are above the shares
            held[project] += size
            if size <= free:
                free -= size
                chosen.add(turn.row.id)
            else:
                self.below_share += 1
        for name in order:
            size = self._work[name].job.gpus
            if name not in chosen and size <= free:
                free -= size
                chosen.add(name)
        return chosen

    def _rank(self, name: str) -> tuple[float, bool, float]:
        work = self._work[name]
        return -self._history.find_index(work), not work.runs, work.job.arrival_s

    def _find_next(self, jobs: Sequence[TraceArrival], at: int, now: float, full: bool) -> float:
        """Return the time of the next pass. While jobs wait, a pass comes early if a job arrives
        with which its project does not exceed its share, or if a job ends and jobs of its project,
        which is then below its share, wait."""
        arrival = float("inf")
        while at < len(jobs) and (not full or jobs[at].arrival_s < now + _PASS_S):
            job = jobs[at]
            if not full or self._held[job.pool] + job.gpus <= self._shares[job.pool]:
                arrival = job.arrival_s
                break
            at += 1
        last = now + _PASS_S if full else float("inf")
        waits = {work.job.pool for work in self._work.values() if not work.runs}
        ends = (
            now + work.left_s + work.repeat_s
            for work in self._work.values()
            if work.runs and (not full or self._falls_short(work.job, waits))
        )
        return min(arrival, last, max(now, min(ends, default=last)))

    def _falls_short(self, job: TraceArrival, waits: Collection[str]) -> bool:
        """Return whether the project is below its share once the job has ended, and waits."""
        held = self._held[job.pool] - job.gpus
        return job.pool in waits and held < self._shares[job.pool]

    def _advance(self, now: float, until: float) -> Iterator[float]:
        """Let the running jobs work. Yield the times of those that end."""
        for name, work in [each for each in self._work.items() if each[1].runs]:
            end = now + work.left_s + work.repeat_s
            worked = min(until, end) - now
            work.used_h += worked * work.job.gpus / _HOUR_S
            repeated = min(work.repeat_s, worked)
            work.repeat_s -= repeated
            work.left_s -= worked - repeated
            if end <= until:
                del self._work[name]
                self._history.add(work)
                yield (end - work.job.arrival_s) / _HOUR_S

"""Runs the workloads of two other schedulers' simulations through `scheduler.shares` on virtual
time: KAI's time-based fair share (NVIDIA/KAI-Scheduler), and Kueue's performance test
(kubernetes-sigs/kueue, test/performance/scheduler), also with its topology of racks.

    python benchmarks/fair_share.py
"""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from heapq import heappop, heappush

from cavvy.domain.allocations import Allocation, Host
from cavvy.domain.jobs import JobRecord
from cavvy.domain.offers import Offer
from cavvy.domain.shares import HeldShare, QueueRow
from cavvy.domain.tasks import ResourceSpec, TaskSpec, TopologyNeed
from cavvy.domain.units import HourlyRate
from cavvy.scheduler.queue import JobPlacement, JobScheduler, QueueCapacity, WaitingJob
from cavvy.scheduler.shares import QueueTurn, ShareBook, ShareRule, decay, give_turns

_CYCLE = timedelta(seconds=60)
_EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
_CPUS = (
    Offer(
        provider="hall", region="b0", instance_type="cpu", vcpus=96, rate=HourlyRate(0), shared=True
    ),
)
# Kueue's classes: name, workloads per queue, one every s, runs s, priority, CPUs
BASELINE = (
    ("large", 50, 1.2, 1.0, 200, 20),
    ("medium", 100, 0.5, 0.5, 100, 5),
    ("small", 350, 0.1, 0.2, 50, 1),
)
LARGE_SCALE = (
    ("large", 4, 0.7, 0.7, 200, 20),
    ("medium", 11, 0.3, 0.35, 100, 5),
    ("small", 35, 0.06, 0.15, 50, 1),
)
# Kueue's classes with topology: nodes, and nodes of a slice
GANGS = {"large": (8, 4), "medium": (4, 2), "small": (2, 1)}
WorkloadClasses = Sequence[tuple[str, int, float, float, int, int]]
NOMINAL = 20  # CPUs of each queue
_HEAD = 24  # jobs of each queue that a pass reads


def run_cycles(gpus: int, size: int, cycles: int, half_life: int) -> Iterator[float]:
    """Let two equal projects, whose jobs run one cycle, take turns. Yield the first one's part of
    all use so far, after each cycle."""
    used, sums = Counter[str](), Counter[str]()
    for cycle in range(cycles):
        book = ShareBook(parents={"a": "", "b": ""}, used_h=dict(used))
        rows = [QueueRow(f"{name}{cycle}{n}", name, "", size) for n in range(9) for name in "ab"]
        held: Counter[str] = Counter()
        for turn in give_turns(rows, book):
            if held.total() + size <= gpus:
                held[turn.row.project] += size
        for name in "ab":
            used[name] = decay(used[name], held[name], _CYCLE, half_life * _CYCLE)  # type: ignore[assignment]
        sums.update(held)
        yield sums["a"] / sums.total()


class Racks:
    """The nodes of Kueue's test with topology: one block of ten racks, each with 64 nodes of 96
    CPUs. Gangs are placed by the policy that places real ones."""

    def __init__(self) -> None:
        self.hosts = [
            Host(
                name=f"hall/r{rack}-n{node}",
                cpus=96,
                memory_mib=1 << 20,
                group="hall/b0",
                labels=(("block", "b0"), ("rack", f"r{rack}")),
            )
            for rack in range(10)
            for node in range(64)
        ]
        self._held: dict[str, Sequence[Allocation]] = {}
        self._pass = JobScheduler(QueueCapacity(hosts=self.hosts))
        self._freed = False  # whether gangs have ended since the pass began
        self.used_s = 0.0  # of this process's CPU, by placements

    def place(self, gang: str, task: TaskSpec) -> bool:
        began = time.process_time()
        if self._freed:
            held = [each for mine in self._held.values() for each in mine]
            self._pass = self._pass.renew(QueueCapacity(hosts=self.hosts, allocations=held))
            self._freed = False
        job = JobRecord(
            id=gang, project="p", name=gang, task=task, submitted_at=_EPOCH, since=_EPOCH
        )
        placed = self._pass.decide(WaitingJob(job=job, gang=gang, offers=_CPUS))
        self.used_s += time.process_time() - began
        if not isinstance(placed, JobPlacement):
            return False
        _check_topology(task, placed.allocations, {each.name: each for each in self.hosts})
        self._held[gang] = placed.allocations
        return True

    def end(self, gang: str) -> None:
        del self._held[gang]
        self._freed = True


def make_gang(kind: str, number: int, cpus: int) -> TaskSpec:
    """Return the task of one workload: a third of each class requires one rack, a third prefers
    one, and a third consists of slices that are each in one rack."""
    nodes, size = GANGS[kind]
    needs = (
        TopologyNeed(same="rack"),
        TopologyNeed(prefer="rack"),
        TopologyNeed(same="rack", slice=size),
    )
    need = ResourceSpec(cpus_min=cpus / nodes)
    return TaskSpec(
        name=kind, run="work", nodes=nodes, resources=need, topology=needs[number % len(needs)]
    )


def _check_topology(
    task: TaskSpec, allocations: Sequence[Allocation], hosts: Mapping[str, Host]
) -> None:
    """Fail if the gang is not where it must be."""
    assert task.topology is not None
    racks = [dict(hosts[each.host].labels)["rack"] for each in allocations]
    size = task.topology.slice or task.nodes
    if task.topology.same:
        assert all(len(set(racks[at : at + size])) == 1 for at in range(0, len(racks), size))
    assert len({each.host for each in allocations}) == task.nodes


def run_cohorts(
    cohorts: int, queues: int, classes: WorkloadClasses, racks: Racks | None = None
) -> tuple[float, dict[str, float]]:
    """Run cohorts of Kueue's test, with this number of queues each. Return the time until all have
    ended, and the mean wait of each class."""
    arrivals = sorted(
        (every * (number + 1), -priority, queue, name, runs, cpus, number)
        for queue in range(cohorts * queues)
        for name, count, every, runs, priority, cpus in classes
        for number in range(count)
    )
    state, at, now = _Cohorts(queues, arrivals, racks), 0, 0.0
    while at < len(arrivals) or state.ends:
        changed: set[int] = set()  # cohorts
        now = min(
            arrivals[at][0] if at < len(arrivals) else float("inf"),
            state.ends[0][0] if state.ends else float("inf"),
        )
        while at < len(arrivals) and arrivals[at][0] <= now:
            changed.add(state.arrive(at))
            at += 1
        while state.ends and state.ends[0][0] <= now:
            changed.add(state.end_first())
        for cohort in sorted(changed):
            state.start(cohort, now)
    return now, {name: sum(each) / len(each) for name, each in state.waits.items()}


class _Cohorts:
    """The workloads that wait and run; `arrivals` names them by their numbers."""

    def __init__(
        self,
        queues: int,  # of a cohort
        arrivals: Sequence[tuple[float, int, int, str, float, int, int]],
        racks: Racks | None,
    ) -> None:
        self._queues, self._arrivals, self._racks = queues, arrivals, racks
        self._lines: defaultdict[int, list[tuple[int, float, int]]] = defaultdict(list)
        self._held: Counter[int] = Counter()
        self.ends: list[tuple[float, int, int]] = []
        self.waits: defaultdict[str, list[float]] = defaultdict(list)

    def arrive(self, at: int) -> int:
        """Add a workload to its queue. Return the cohort."""
        since, rank, queue, *_ = self._arrivals[at]
        heappush(self._lines[queue], (rank, since, at))
        return queue // self._queues

    def end_first(self) -> int:
        """End the workload that ends next. Return the cohort."""
        _, ended, cpus = heappop(self.ends)
        queue = self._arrivals[ended][2]
        self._held[queue] -= cpus
        if self._racks is not None:
            self._racks.end(str(ended))
        return queue // self._queues

    def start(self, cohort: int, now: float) -> None:
        """Start what has the turn in a cohort, as long as its CPUs suffice."""
        mine = range(cohort * self._queues, (cohort + 1) * self._queues)
        free = self._queues * NOMINAL - sum(self._held[queue] for queue in mine)
        if not free:
            return
        started = set()
        for turn in self._give_turns(mine):
            at = int(turn.row.id)
            since, _, queue, name, runs, cpus, number = self._arrivals[at]
            if cpus > free:
                break  # no later job passes the one that has the turn
            if self._racks is not None and not self._racks.place(
                turn.row.id, make_gang(name, number, cpus)
            ):
                continue
            free -= cpus
            self._held[queue] += cpus
            heappush(self.ends, (now + runs, at, cpus))
            self.waits[name].append(now - since)
            started.add(at)
        if started:
            for queue in mine:
                kept = (entry for entry in self._lines[queue] if entry[2] not in started)
                self._lines[queue][:] = sorted(kept)

    def _give_turns(self, mine: Sequence[int]) -> Iterator[QueueTurn]:
        heads = sorted(entry for queue in mine for entry in sorted(self._lines[queue])[:_HEAD])
        rows = [
            QueueRow(str(at), str(self._arrivals[at][2]), "", self._arrivals[at][5])
            for _, _, at in heads
        ]
        names = [str(queue) for queue in mine]
        book = ShareBook(
            parents=dict.fromkeys(names, ""),
            rules={name: ShareRule(quota=NOMINAL) for name in names},
            held=[HeldShare(project=str(q), user="", gpus=self._held[q], jobs=1) for q in mine],
        )
        return give_turns(rows, book)


def find_bound(classes: WorkloadClasses) -> float:
    """Return a time before which no schedule ends: for each moment, the work that even unlimited
    CPUs could not have done by then, on the CPUs that there are."""
    jobs = [
        (every * (number + 1), runs, cpus)
        for _, count, every, runs, _, cpus in classes
        for number in range(count)
    ]
    moments = [since / 20 for since in range(20 * round(max(job[0] for job in jobs)) + 20)]
    return max(
        moment
        + sum(cpus * (runs - min(runs, max(0.0, moment - since))) for since, runs, cpus in jobs)
        / NOMINAL
        for moment in moments
    )


def main() -> None:
    for what, given in (
        ("KAI, 8 GPUs, jobs of 4", (8, 4, 100, 5)),
        ("KAI, 16 GPUs, jobs of 16", (16, 16, 1024, 128)),
    ):
        parts = list(run_cycles(*given))
        swing = max(abs(part - 0.5) for part in parts[10:])
        near = next(n for n in range(len(parts)) if all(abs(p - 0.5) <= 0.05 for p in parts[n:]))
        print(f"{what}: within 5 % of one half from cycle {near + 1}, then at most {swing:.3f} off")
    for what, queues, classes in (
        ("Kueue's baseline", 6, BASELINE),
        ("Kueue at large scale", 100, LARGE_SCALE),
    ):
        took, waits = run_cohorts(1, queues, classes)
        print(f"{what}, one of its equal cohorts: {took:.1f} s of virtual time; {_say(waits)}")
        print(f"  the shortest possible time is at least {find_bound(classes) / took:.1%} of that")
    racks = Racks()
    took, waits = run_cohorts(5, 6, BASELINE, racks)
    work = 5 * 6 * sum(count * runs * cpus for _, count, _, runs, _, cpus in BASELINE)
    print(f"Kueue's baseline with topology: {took:.1f} s of virtual time; {_say(waits)}")
    print(
        f"  use of the quotas {work / (5 * 6 * NOMINAL * took):.1%}; at least "
        f"{find_bound(BASELINE) / took:.1%} of the shortest time; placements took "
        f"{racks.used_s:.1f} s of CPU"
    )
    print("  Kueue: 401 s, 62.4 %; waits: large 38-40 s, medium 106-107 s, small 238-247 s")


def _say(waits: Mapping[str, float]) -> str:
    return "waits: " + ", ".join(f"{name} {wait:.1f} s" for name, wait in sorted(waits.items()))


if __name__ == "__main__":
    main()

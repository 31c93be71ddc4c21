"""Runs the workloads of two other schedulers' simulations through `scheduler.shares` on virtual
time: KAI's time-based fair share (NVIDIA/KAI-Scheduler), and Kueue's performance test
(kubernetes-sigs/kueue, test/performance/scheduler).

    python benchmarks/fair_share.py
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from datetime import timedelta
from heapq import heappop, heappush

from cavvy.domain.shares import HeldShare, QueueRow
from cavvy.scheduler.shares import ShareBook, ShareRule, decay, give_turns

_CYCLE = timedelta(seconds=60)
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


def run_cohort(queues: int, classes: WorkloadClasses) -> tuple[float, dict[str, float]]:
    """Run one cohort of Kueue's test. Return the time until all have ended, and the mean wait of
    each class."""
    arrivals = sorted(
        (every * (number + 1), -priority, queue, name, runs, cpus)
        for queue in range(queues)
        for name, count, every, runs, priority, cpus in classes
        for number in range(count)
    )
    rules = {str(queue): ShareRule(quota=NOMINAL) for queue in range(queues)}
    lines: defaultdict[int, list[tuple[int, float, int]]] = defaultdict(list)
    held: Counter[int] = Counter()
    ends: list[tuple[float, int, int]] = []
    waits: defaultdict[str, list[float]] = defaultdict(list)
    at, now = 0, 0.0
    while at < len(arrivals) or ends:
        now = min(
            arrivals[at][0] if at < len(arrivals) else float("inf"),
            ends[0][0] if ends else float("inf"),
        )
        while at < len(arrivals) and arrivals[at][0] <= now:
            since, rank, queue, *_ = arrivals[at]
            heappush(lines[queue], (rank, since, at))
            at += 1
        while ends and ends[0][0] <= now:
            _, queue, cpus = heappop(ends)
            held[queue] -= cpus
        free = queues * NOMINAL - held.total()
        if not free:
            continue
        heads = sorted(entry for line in lines.values() for entry in sorted(line)[:_HEAD])
        rows = [QueueRow(str(n), str(arrivals[n][2]), "", arrivals[n][5]) for _, _, n in heads]
        book = ShareBook(
            parents=dict.fromkeys(rules, ""),
            rules=rules,
            held=[HeldShare(project=str(q), user="", gpus=held[q], jobs=1) for q in held],
        )
        started = set()
        for turn in give_turns(rows, book):
            since, _, queue, name, runs, cpus = arrivals[int(turn.row.id)]
            if cpus > free:
                break  # no later job passes the one that has the turn
            free -= cpus
            held[queue] += cpus
            heappush(ends, (now + runs, queue, cpus))
            waits[name].append(now - since)
            started.add(int(turn.row.id))
        if started:
            for line in lines.values():
                line[:] = sorted(entry for entry in line if entry[2] not in started)
    return now, {name: sum(each) / len(each) for name, each in waits.items()}


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
        took, waits = run_cohort(queues, classes)
        told = ", ".join(f"{name} {wait:.1f} s" for name, wait in sorted(waits.items()))
        print(f"{what}, one of its equal cohorts: {took:.1f} s of virtual time; waits: {told}")
        print(f"  the shortest possible time is at least {find_bound(classes) / took:.1%} of that")


if __name__ == "__main__":
    main()

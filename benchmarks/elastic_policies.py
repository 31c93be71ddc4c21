"""Compares rules that choose the sizes of elastic jobs, on the profiles and workloads of other
papers, first with the rules of these papers.

    python benchmarks/elastic_policies.py             # all tables
    python benchmarks/elastic_policies.py pollux      # Pollux (OSDI'21): 160 jobs, 64 GPUs
    python benchmarks/elastic_policies.py sia         # Sia (SOSP'23): 64 GPUs of three types
    python benchmarks/elastic_policies.py shockwave   # Shockwave (NSDI'23): rounds on 32 GPUs
    python benchmarks/elastic_policies.py speed       # one decision: 2,000 jobs, 2,048 GPUs
    python benchmarks/elastic_policies.py scaling     # what twice as many nodes gain

The profiles are read from ../shared/data/traces (or CAVVY_DATA). Restarts cost what the authors'
simulators charge. "Cavvy" is src/cavvy/scheduler/goodput.py, which is the same in production: with
what all jobs of one program have measured, with what each job has measured itself, and for jobs
that do not tell how much work they have left. Needs NumPy and SciPy.
"""

import argparse
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from elastic_cluster.cluster import Machines, Memory, Rule, Run, read_workload, simulate
from elastic_cluster.ours import Goodput, SizeTable
from elastic_cluster.profiles import EPOCHS, Profile
from elastic_cluster.rounds import (
    ROUND_S,
    SlackFirst,
    Slicer,
    find_fairness,
    read_sliced,
    run_first,
    run_least_served,
    run_shortest,
    share_in_rounds,
)
from elastic_cluster.rules import Optimus, Tiresias
from elastic_cluster.typed_rules import Gavel, Sia

from cavvy.domain.elastic import ElasticJob, ElasticSize
from cavvy.domain.goodput import StepTimes
from cavvy.scheduler.goodput import Room, choose_sizes

ROOT = Path(__file__).resolve().parents[1]
TRACES = Path(os.environ.get("CAVVY_DATA", ROOT.parent / "shared" / "data")) / "traces"
HOMOGENEOUS = {"aws": Machines(nodes=16, gpus=4)}
# T4, A100 and RTX 2080 Ti; seconds of a restart, and how much slower than its profile each program
# is, all from the simulator of Sia.
TYPES = {
    "aws": Machines(nodes=6, gpus=4),
    "dgx-ext": Machines(nodes=2, gpus=8),
    "rtx": Machines(nodes=3, gpus=8),
}
SHOCKWAVE_JOBS, SHOCKWAVE_GPUS = 120, 32
RESTART_S = {"cifar10": 50, "deepspeech2": 25, "bert": 120, "yolov3": 80, "imagenet": 250}
SLOWDOWNS = {"cifar10": 1.8}  # of the others 1.2


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="*", choices=(*TABLES, []), help="all, if none is named")
    for name in parser.parse_args().tables or list(TABLES):
        TABLES[name]()
    return 0


def compare_pollux() -> None:
    """160 jobs on 64 GPUs. All rules decide every 60 s, and a restart costs 30 s."""
    profiles = read_pollux()
    print(f"{'rule':<46} {'mean s':>8} {'published':>10} {'P99 s':>8} {'restarts':>9} {'CPU s':>6}")
    for name, published, rule, options in list_pollux():
        began = time.process_time()
        jobs = make_pollux(profiles, **options)
        simulate(jobs, HOMOGENEOUS, rule, interval=60, always=True)
        times = sorted(find_times(jobs))
        restarts = sum(job.restarts or 0 for job in jobs) / len(jobs)
        print(
            f"{name:<46} {sum(times) / len(times):>8.0f} {published:>10} "
            f"{times[int(0.99 * len(times))]:>8.0f} {restarts:>9.1f} "
            f"{time.process_time() - began:>6.1f}"
        )


def list_pollux() -> Iterable[tuple[str, str, Rule, dict[str, bool]]]:
    yield "Tiresias, tuned jobs", "3,470", Tiresias("aws"), {"adaptive": False}
    yield "Optimus with an oracle, tuned jobs", "5,302", Optimus("aws"), {"adaptive": False}
    yield "Cavvy, remembers programs", "(2,446)", Goodput(), {}
    yield "Cavvy, each job measures for itself", "(2,446)", Goodput(), {"shared": False}
    unknown = Goodput(knows_length=False)
    yield "Cavvy, remembers programs, unknown lengths", "(2,446)", unknown, {}


def read_pollux() -> dict[str, dict[str, Profile]]:
    folder = TRACES / "sia/model_profiles"
    return {
        name: {"aws": Profile(folder / name, "aws", most_part=8 if name == "yolov3" else None)}
        for name in EPOCHS
    }


def make_pollux(
    profiles: dict[str, dict[str, Profile]], adaptive: bool = True, shared: bool = True
) -> Sequence[Run]:
    """The jobs of workload 6. Those that are not adaptive keep the batch of their file. NCF runs on
    one GPU, where an adaptive rule has it use its largest batch, as in the authors' simulator."""
    memories: dict[str, Memory] = {}
    jobs = []
    for name, submitted, program, asked, batch in read_workload(TRACES / "pollux/workload-6.csv"):
        job = Run(name, profiles[program], submitted, asked, batch)
        job.measures = job.tuned = adaptive
        if program == "ncf":
            job.limit, job.tuned = 1, False
            job.batch = 32768 if adaptive else batch
        if shared:
            job.memory = memories.setdefault(program, Memory())
        jobs.append(job)
    return jobs


def compare_sia() -> None:
    """Three workloads of each trace on 24 T4, 16 A100 and 24 RTX 2080 Ti; the paper has the means
    of ten workloads, of which these are three."""
    published = {
        "philly": "0.6 / 9.5 / 4.0",
        "saturn": "0.7 / 10.9 / 4.8",
        "newtrace": "0.7 / 4.6 / 3.0",
    }
    profiles = read_sia()
    print("mean h / P99 h / GPU-hours a job")
    for trace, figures in published.items():
        print(f"{trace}: Sia's paper {figures}")
        for path in sorted((TRACES / "sia" / trace).glob("*.csv")):
            for name, rule, interval, options in list_sia():
                began = time.process_time()
                jobs = make_sia(profiles, path, **options)
                held = simulate(jobs, TYPES, rule, interval, always=False)
                times = sorted(find_times(jobs))
                print(
                    f"  {path.stem} {name:<36} {sum(times) / len(times) / 3600:.2f} / "
                    f"{times[int(0.99 * len(times))] / 3600:.1f} / "
                    f"{sum(held.values()) / 3600 / len(jobs):.2f}, "
                    f"{time.process_time() - began:.0f} CPU s",
                    flush=True,
                )


def list_sia() -> Iterable[tuple[str, Rule, float, dict[str, bool]]]:
    yield "Gavel, tuned jobs", Gavel(360), 360, {"adaptive": False}
    yield "Sia", Sia(SizeTable()), 60, {"shared": False}
    yield "Cavvy, remembers programs", Goodput(), 60, {}
    yield "Cavvy, each job measures for itself", Goodput(), 60, {"shared": False}


def read_sia() -> dict[str, dict[str, Profile]]:
    folder = TRACES / "sia/model_profiles"
    return {
        name: {
            kind: Profile(
                folder / name,
                kind,
                most_part=57 if (name, kind) == ("deepspeech2", "rtx") else None,
                per_placement=True,
            )
            for kind in TYPES
        }
        for name in RESTART_S
    }


def make_sia(
    profiles: dict[str, dict[str, Profile]],
    path: Path,
    adaptive: bool = True,
    shared: bool = True,
) -> Sequence[Run]:
    memories: dict[str, Memory] = {}
    jobs = []
    for name, submitted, program, asked, batch in read_workload(path):
        job = Run(name, profiles[program], submitted, asked, batch)
        job.restart_s, job.slowdown = RESTART_S[program], SLOWDOWNS.get(program, 1.2)
        job.measures = job.tuned = adaptive
        if shared:
            job.memory = memories.setdefault(program, Memory())
        jobs.append(job)
    return jobs


def find_times(jobs: Iterable[Run]) -> Iterable[float]:
    for job in jobs:
        assert job.finished is not None
        yield job.finished - job.submitted


def compare_shockwave() -> None:
    """120 jobs with fixed numbers of GPUs, which change their batch, on 32 V100 in rounds of 120 s.
    Shockwave's own rule, a mixed-integer program, is not played; its figures are the published
    ones of the same trace."""
    print(
        f"{'rule':<44} {'makespan s':>10} {'mean s':>7} {'worst':>6} {'> 1.05':>7} {'restarts':>9}"
    )
    print(f"{'Shockwave, published':<44} {24197:>10} {9958:>7} {1.78:>6.2f} {0.05:>7.1%}")
    for name, rule in list_shockwave():
        end, mean, rhos, restarts = play_shockwave(rule)
        late = sum(each > 1.05 for each in rhos) / len(rhos)
        worst = max(rhos)
        print(f"{name:<44} {end:>10.0f} {mean:>7.0f} {worst:>6.2f} {late:>7.1%} {restarts:>9.1f}")


def list_shockwave() -> Iterable[tuple[str, Slicer]]:
    yield "first in, first out", run_first
    yield "least attained service", run_least_served
    yield "shortest first", run_shortest
    for rounds in (20, 25, 30, 40):
        for foresees in (True, False):
            what = "foresees batches" if foresees else "present batch"
            rule = SlackFirst(SHOCKWAVE_JOBS / SHOCKWAVE_GPUS, rounds * ROUND_S, foresees)
            yield f"slack below {rounds} rounds first; {what}", rule


def play_shockwave(rule: Slicer) -> tuple[float, float, Sequence[float], float]:
    """Return the makespan and the mean time in seconds, the finish-time fairness of each job, and
    the restarts of a job."""
    jobs = read_sliced(TRACES / "shockwave")
    end = share_in_rounds(jobs, SHOCKWAVE_GPUS, rule)
    times = [each.finished - each.arrived for each in jobs]
    rhos = [find_fairness(each, len(jobs), SHOCKWAVE_GPUS) for each in jobs]
    return end, sum(times) / len(jobs), rhos, sum(each.restarts for each in jobs) / len(jobs)


def measure_speed() -> None:
    """One decision about 2,000 jobs, of which three in four run, on 2,048 GPUs of three types."""
    for count, each in ((2000, 683), (500, 171), (64, 22)):
        jobs, room = make_many(count, each)
        began = time.process_time()
        chosen = choose_sizes(jobs, room)
        took = time.process_time() - began
        used = sum(size.accelerators for size in chosen.values())
        total = sum(room.free.values())
        print(f"{count} jobs, {total} GPUs: {took:.2f} CPU s; {len(chosen)} jobs on {used} GPUs")


def make_many(count: int, each: int) -> tuple[Sequence[ElasticJob], Room]:
    chance = random.Random(7)
    jobs = []
    for number in range(count):
        sizes = []
        for kind, speed in (("A100", 1.0), ("V100", 0.5), ("T4", 0.25)):
            times = StepTimes(
                compute_s=0.05 / speed,
                compute_sample_s=chance.uniform(0.001, 0.01) / speed,
                between_s=chance.uniform(0.01, 0.2),
                between_replica_s=0.001,
            )
            for nodes, gpus in [(1, 1), (1, 2), (1, 4), (1, 8), (2, 8), (4, 8), (8, 8)]:
                rate = 64 * nodes * gpus / times.step_s(nodes, nodes * gpus, 64)
                size = ElasticSize(
                    nodes=nodes, accelerator=kind, accelerators_per_node=gpus, throughput=rate
                )
                sizes.append(size)
        jobs.append(
            ElasticJob(
                id=str(number),
                sizes=tuple(sizes),
                current=chance.choice(sizes) if number % 4 else None,
                resize_s=60.0,
                remaining=10 ** chance.uniform(4, 8),
            )
        )
    return jobs, Room(free={"A100": each, "V100": each, "T4": each - 1})


def measure_scaling() -> None:
    """How the step of a fixed batch gets faster on twice as many nodes of four T4, as the power of
    the nodes: 1 is ideal, 0 no gain. The batch is the largest that one node takes at once."""
    powers = []
    for name, kinds in read_pollux().items():
        profile, told = kinds["aws"], []
        local = profile.placements[4,][-1][0]
        for nodes in (1, 2, 4):
            before = profile.steps((4,) * nodes, int(local / nodes))
            after = profile.steps((4,) * 2 * nodes, int(local / nodes / 2))
            if before is None or after is None:
                told.append("-")
                continue
            powers.append(math.log2(before[0] / after[0]))
            told.append(f"{powers[-1]:.2f}")
        print(f"{name}: 1 to 2, 2 to 4 and 4 to 8 nodes: {', '.join(told)}")
    print(f"{len(powers)} powers, median {statistics.median(powers):.2f}")


TABLES: dict[str, Callable[[], None]] = {
    "pollux": compare_pollux,
    "sia": compare_sia,
    "shockwave": compare_shockwave,
    "speed": measure_speed,
    "scaling": measure_scaling,
}

if __name__ == "__main__":
    sys.exit(main())

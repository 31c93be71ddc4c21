"""Plants eight wastes of varied size among healthy jobs, and compares the advice with reruns.

    python scripts/drills/advice.py --seeds 1 2 3

Each job is simulated minute by minute: the GPU computes, waits for the host or its data, pauses for
checkpoints, and is preempted. What agents would report and the ledger would charge is all that the
rules see. The same work is then simulated again as the advice says, with the same events, and the
advice must be right within 15 % of the difference. The rerun shares no formula with the rules.
"""

import argparse
import random
import sys
from collections.abc import Mapping
from datetime import timedelta

from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.tasks import SpotPolicy
from cavvy.domain.units import HourlyRate, Money
from cavvy.domain.values import Struct, replace
from cavvy.planner.advice import ObservedRun, Waste, WasteKind, advise

PERIOD = timedelta(days=30)
_STEP_S = 10.0


def make_offer(name: str, gpu: str, dollars: float, **changes: object) -> Offer:
    """An offer of the drill's only provider."""
    values = {
        "provider": "aws",
        "region": "here",
        "instance_type": name,
        "accelerator": gpu,
        "accelerator_count": 1,
        "vcpus": 16,
        "memory_mib": 131_072,
        "rate": HourlyRate(round(dollars * 1_000_000)),
        **changes,
    }
    return Offer(**values)  # type: ignore[arg-type]  # the fields' values are given by name


OFFERS = [
    make_offer("h100", "H100", 4.0, accelerator_memory_mib=81_920, memory_mib=262_144),
    make_offer("h100-small", "H100", 2.8, accelerator_memory_mib=81_920, memory_mib=65_536),
    make_offer("a100", "A100", 3.2, accelerator_memory_mib=81_920, memory_mib=262_144),
    make_offer("l4", "L4", 0.7, accelerator_memory_mib=24_576, memory_mib=65_536),
    make_offer(
        "a100",
        "A100",
        1.4,
        accelerator_memory_mib=81_920,
        memory_mib=262_144,
        purchase=Purchase.SPOT,
    ),
]
H100, SMALL, A100, L4, SPOT = OFFERS


class SimulatedJob(Struct, frozen=True, kw_only=True):
    """A job. `gpu_hours` is its work on an H100, and `host` the part of a step's time that the host
    needs beside the GPU. `wait` is the time that a step waits for data, relative to its own.
    """

    offer: Offer
    gpu_hours: float = 10.0
    host: float = 0.04
    wait: float = 0.0
    hung_hours: float = 0.0  # after the work, the program hangs
    stop_idle_hours: float = 1e9  # the idle limit
    memory_mib: float = 100_000
    gpu_memory_mib: float = 60_000
    every_s: float = 0.0  # 0: it saves no checkpoints
    pause_s: float = 0.0
    losses_per_hour: float = 0.0
    kept_hours: float = 0.0
    loose_hours: float = 0.0  # for how long the disk stays after the machine
    disk: HourlyRate = HourlyRate(100_000)
    spot: SpotPolicy = SpotPolicy.AUTO
    speed: float = 1.0  # of the GPU, relative to the first


class SimulatedRun(Struct, kw_only=True):
    """What happened, in seconds."""

    wall: float = 0.0
    gpu: float = 0.0
    pauses: float = 0.0
    checkpoints: int = 0


def simulate(job: SimulatedJob, dice: random.Random) -> SimulatedRun:
    """Run the job in steps of ten seconds of GPU time."""
    run = SimulatedRun()
    work, saved, since_save = job.gpu_hours * 3600, 0.0, 0.0
    done = 0.0
    while done < work:
        step = min(_STEP_S, work - done)
        gpu = step / job.speed
        length = (gpu + step * job.host / (1 - job.host)) * (1 + job.wait)
        run.wall += length
        since_save += length
        if dice.random() < job.losses_per_hour * length / 3600:
            run.wall += 120
            done, since_save = saved, 0.0
            continue
        run.gpu += gpu
        done += step
        if job.every_s and since_save >= job.every_s:
            run.wall += job.pause_s
            run.pauses += job.pause_s
            run.checkpoints += 1
            saved, since_save = done, 0.0
    run.wall += min(job.hung_hours, job.stop_idle_hours) * 3600
    return run


def cost_of(job: SimulatedJob, run: SimulatedRun) -> float:
    """What the machine, the kept machine and the disk cost, in micro-dollars."""
    rate = job.offer.rate.micros_per_hour
    hours = run.wall / 3600
    disk = job.disk.micros_per_hour * (hours + job.kept_hours + job.loose_hours)
    return rate * (hours + job.kept_hours) + disk


def observe(name: str, job: SimulatedJob, run: SimulatedRun) -> ObservedRun:
    """What the agent and the ledger tell of the run."""
    hours, rate = run.wall / 3600, job.offer.rate.micros_per_hour
    cpu = 0.95 if job.wait else 0.3
    return ObservedRun(
        project="default",
        job=name,
        attempt=1,
        nodes=1,
        offer=job.offer,
        charged=Money(round(rate * hours)),
        hours=hours,
        cpu_percent=cpu * 100 * job.offer.vcpus,
        gpu_percent=round(100 * run.gpu / run.wall, 1),
        memory_peak_mib=job.memory_mib,
        gpu_memory_peak_mib=job.gpu_memory_mib,
        measured=timedelta(seconds=run.wall),
        checkpoints=run.checkpoints,
        pause=timedelta(seconds=run.pauses),
        spot=job.spot,
        kept=Money(round(rate * job.kept_hours)),
        kept_hours=job.kept_hours,
        unattached=Money(round(job.disk.micros_per_hour * job.loose_hours)),
    )


def plant(kind: WasteKind, dice: random.Random) -> SimulatedJob:
    """A job with this waste, of a random size."""
    job = SimulatedJob(offer=H100, gpu_hours=dice.uniform(20, 200))
    match kind:
        case WasteKind.IDLE_GPU:
            return replace(job, gpu_hours=dice.uniform(0.05, 0.2), hung_hours=dice.uniform(20, 200))
        case WasteKind.UNUSED_MEMORY:
            return replace(job, memory_mib=dice.uniform(5_000, 45_000))
        case WasteKind.STARVED:
            return replace(job, wait=dice.uniform(0.7, 3))
        case WasteKind.LARGE_GPU:
            host = dice.uniform(0.8, 0.94)
            return replace(
                job,
                host=host,
                gpu_hours=job.gpu_hours * (1 - host),
                gpu_memory_mib=dice.uniform(2_000, 15_000),
            )
        case WasteKind.SPOT:
            return replace(
                job,
                offer=A100,
                spot=SpotPolicy.NEVER,
                every_s=dice.uniform(600, 1800),
                pause_s=2,
                gpu_hours=dice.uniform(150, 400),
            )
        case WasteKind.CHECKPOINTS:
            return replace(job, every_s=dice.uniform(60, 240), pause_s=dice.uniform(25, 60))
        case WasteKind.KEPT:
            return replace(job, kept_hours=dice.uniform(30, 150), gpu_hours=dice.uniform(10, 60))
        case _:
            return replace(job, loose_hours=dice.uniform(100, 600))


def follow(waste: Waste, job: SimulatedJob) -> SimulatedJob:
    """The same job as the advice says."""
    match waste.kind:
        case WasteKind.IDLE_GPU:
            return replace(job, stop_idle_hours=0.5)
        case WasteKind.UNUSED_MEMORY:
            return replace(job, offer=waste.offer or job.offer)
        case WasteKind.STARVED:
            return replace(job, wait=0.0)
        case WasteKind.LARGE_GPU:
            return replace(job, offer=waste.offer or job.offer, speed=121 / 989.4)
        case WasteKind.SPOT:
            return replace(job, offer=waste.offer or job.offer, losses_per_hour=0.2)
        case WasteKind.CHECKPOINTS:
            every = waste.every.total_seconds() if waste.every else job.every_s
            return replace(job, every_s=every)
        case WasteKind.KEPT:
            return replace(job, kept_hours=1 / 6)
        case _:
            return replace(job, loose_hours=0.0)


def make_healthy(dice: random.Random) -> SimulatedJob:
    """A job about which there is nothing to say, of one of several kinds."""
    job = SimulatedJob(
        offer=dice.choice([H100, SPOT]),
        gpu_hours=dice.uniform(1.5, 300),
        host=dice.uniform(0.02, 0.3),
        wait=dice.choice([0.0, 0.0, dice.uniform(0, 0.1)]),
        memory_mib=dice.uniform(110_000, 200_000),
        gpu_memory_mib=dice.uniform(25_000, 78_000),
        kept_hours=dice.choice([0.0, dice.uniform(0, 0.3)]),
        every_s=dice.choice([0.0, dice.uniform(1200, 3600)]),
        pause_s=dice.uniform(1, 30),
        losses_per_hour=dice.choice([0.0, 0.05]),
    )
    if not job.every_s:
        return replace(job, losses_per_hour=0.0)
    return replace(job, losses_per_hour=0.2) if job.offer == SPOT else job


def drill(seed: int, healthy: int = 20) -> tuple[Mapping[WasteKind, float], list[str]]:
    """Play one seed. Returns how far the advice is from the rerun, as a part, for each waste that
    was planted and found, and what is wrong.
    """
    dice = random.Random(seed)
    jobs = {str(kind): plant(kind, dice) for kind in WasteKind}
    jobs |= {f"healthy {number}": make_healthy(dice) for number in range(healthy)}
    runs = {name: simulate(job, random.Random(seed)) for name, job in jobs.items()}
    observed = [observe(name, job, runs[name]) for name, job in jobs.items()]
    dice.shuffle(observed)
    found = advise(observed, OFFERS, PERIOD)
    errors: dict[WasteKind, float] = {}
    wrong = []
    for waste in found:
        if waste.job != waste.kind:
            wrong.append(f"{waste.kind} was found in the job {waste.job!r}")
            continue
        job = jobs[waste.job]
        again = follow(waste, job)
        rerun = simulate(again, random.Random(seed))
        saved = cost_of(job, runs[waste.job]) - cost_of(again, rerun)
        if waste.kind is not WasteKind.VOLUME:  # the disk's time is none of the advice's business
            saved += job.disk.micros_per_hour * (rerun.wall - runs[waste.job].wall) / 3600
            saved -= job.disk.micros_per_hour * (job.kept_hours - again.kept_hours)
        errors[waste.kind] = waste.amount.micros / saved - 1
        if abs(errors[waste.kind]) > 0.15:
            wrong.append(f"{waste.kind}: {waste.amount.usd:.2f} is not {saved / 1e6:.2f}")
    wrong += [f"{kind} was not found" for kind in WasteKind if kind not in errors]
    return errors, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--healthy", type=int, default=20)
    asked = parser.parse_args()
    failed = False
    for seed in asked.seeds:
        errors, wrong = drill(seed, asked.healthy)
        worst = max(map(abs, errors.values()), default=0)
        print(f"seed {seed}: {len(errors)} of 8 found, dollars within {worst:.1%} of the rerun")
        print("".join(f"  {each}\n" for each in wrong), end="")
        failed = failed or bool(wrong)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""The simulator of Shockwave (NSDI'23) in small: jobs with a fixed number of GPUs share a cluster
in rounds, and change their batch while they train. What a round is and costs is that of the
authors' simulator:
* a round lasts 120 s, or until the last of its jobs ends,
* a job that did not run in the round before loses 20 s of a whole round,
* a job has arrived at the first round after its submission, from which its time counts,
* finish-time fairness is this time, relative to the job's own time without others, times the jobs
  of the trace for each GPU.

A job's batch follows its mode: `static`, `accordion` (the largest batch outside of critical epochs,
in the last 70 % of the job) or `gns` (twice as large at the epochs of a measured table). Needs no
other package.
"""

import gzip
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROUND_S, PREEMPTION_S = 120.0, 20.0
SAMPLES = {
    "ResNet-18": 50000,
    "ResNet-50": 100000,
    "Transformer": 10000,
    "LM": 59675,
    "Recommendation": 117907,
}
MOST = {"ResNet-18": 256, "ResNet-50": 128, "Transformer": 128, "LM": 80, "Recommendation": 8192}
# By program, batch and GPUs: the epochs from which the batch is 2, 4, 8 and 16 times as large.
DOUBLINGS = {
    ("ResNet-18", 16, 1): (31, 41, 51, 71),
    ("ResNet-18", 32, 1): (21, 31, 51),
    ("ResNet-18", 64, 1): (11, 31),
    ("ResNet-18", 128, 1): (11,),
    ("ResNet-18", 16, 2): (21, 31, 91, 111),
    ("ResNet-18", 32, 2): (11, 21, 41),
    ("ResNet-18", 64, 2): (21, 41),
    ("ResNet-18", 128, 2): (41,),
    ("ResNet-18", 16, 4): (11, 21, 81, 91),
    ("ResNet-18", 32, 4): (21, 31, 61),
    ("ResNet-18", 64, 4): (11, 61),
    ("ResNet-18", 128, 4): (11,),
    ("ResNet-50", 64, 1): (101,),
    ("ResNet-50", 32, 2): (101, 111),
    ("ResNet-50", 64, 2): (81,),
    ("ResNet-50", 32, 4): (131, 221),
    ("ResNet-50", 64, 4): (191,),
    ("LM", 5, 1): (31, 41, 61, 71),
    ("LM", 10, 1): (11, 21, 41),
    ("LM", 20, 1): (11, 41),
    ("LM", 40, 1): (11,),
    ("LM", 5, 2): (31, 51, 61, 71),
    ("LM", 10, 2): (11, 31, 41),
    ("LM", 20, 2): (31, 41),
    ("LM", 40, 2): (11,),
    ("LM", 5, 4): (11, 31, 71, 91),
    ("LM", 10, 4): (11, 31, 61),
    ("LM", 20, 4): (11, 61),
    ("LM", 40, 4): (61,),
    ("Recommendation", 512, 1): (21, 41, 71, 91),
    ("Recommendation", 1024, 1): (21, 51, 91),
    ("Recommendation", 2048, 1): (21, 41),
    ("Recommendation", 4096, 1): (41,),
}


@dataclass
class Sliced:
    """A job of the trace."""

    name: str
    program: str
    batch: int
    gpus: int
    mode: str
    steps: int
    submitted: float
    rates: dict[int, float]  # steps per second by batch
    epoch: float = 0.0  # done
    arrived: float | None = None
    finished: float | None = None
    ran_in: int = -2  # the last round
    restarts: int = 0
    service_s: float = 0.0

    @cached_property
    def epochs(self) -> float:
        """The epochs of the whole job."""
        return self.steps / math.ceil(SAMPLES[self.program] / self.batch)

    def find_batch(self, epoch: int) -> int:
        if self.mode == "accordion":
            late = epoch > math.ceil(self.epochs) * 0.3
            return MOST[self.program] if late and not self._is_critical(epoch) else self.batch
        if self.mode == "gns":
            doublings = DOUBLINGS.get((self.program, self.batch, self.gpus), ())
            larger = self.batch * 2 ** sum(epoch >= each for each in doublings)
            return min(larger, MOST[self.program])
        return self.batch

    def _is_critical(self, epoch: int) -> bool:
        match self.program:
            case "ResNet-18":
                first = 20 if self.batch == 256 else 10
                return epoch < first or 150 <= epoch < 160 or 250 <= epoch < 260
            case "ResNet-50":
                return epoch % 30 < 10
            case "LM":
                return epoch < 10
            case "Recommendation":
                first = {512: 30, 1024: 30, 2048: 40}.get(self.batch, 10)
                return epoch < first or 60 <= epoch < 70 or 80 <= epoch < 90
        return True  # a Transformer keeps its batch

    def epoch_s(self, epoch: int) -> float:
        """The seconds of one epoch."""
        batch = self.find_batch(epoch)
        return SAMPLES[self.program] / batch / self.rates[batch]

    @cached_property
    def _ends(self) -> Sequence[float]:
        """The seconds of work at the end of each epoch."""
        ends, total = [], 0.0
        for epoch in range(math.ceil(self.epochs)):
            total += self.epoch_s(epoch) * min(self.epochs - epoch, 1.0)
            ends.append(total)
        return ends

    @property
    def alone_s(self) -> float:
        """The seconds of the whole job without others."""
        return self._ends[-1]

    @property
    def done_s(self) -> float:
        whole = int(self.epoch)
        if whole >= len(self._ends):
            return self.alone_s
        before = self._ends[whole - 1] if whole else 0.0
        return before + (self.epoch - whole) * self.epoch_s(whole)

    @property
    def left_s(self) -> float:
        return max(self.alone_s - self.done_s, 0.0)

    def guess_left_s(self) -> float:
        """The seconds that are left if the job goes on with its present batch."""
        last = math.ceil(self.epochs) - 1
        return (self.epochs - self.epoch) * self.epoch_s(min(int(self.epoch), last))

    def work(self, seconds: float) -> float:
        """Train for at most so many seconds, and return those that were used."""
        used = 0.0
        while used < seconds - 1e-9 and self.epoch < self.epochs - 1e-9:
            whole = int(self.epoch + 1e-9)
            each = self.epoch_s(whole)
            todo = min(whole + 1.0, self.epochs) - self.epoch
            step = min(todo, (seconds - used) / each)
            self.epoch += step
            used += step * each
        return used


Slicer = Callable[[float, int, Sequence[Sliced], int], Sequence[Sliced]]


def read_sliced(folder: Path) -> list[Sliced]:
    """Read the trace and the throughputs."""
    with gzip.open(folder / "tacc_throughputs.json.gz", "rt") as file:
        table = json.load(file)["v100"]
    jobs = []
    for number, line in enumerate((folder / "tacc_120jobs_32gpu.trace").read_text().splitlines()):
        row = line.split("\t")
        program, _, batch = row[0].partition(" (batch size ")
        gpus = int(row[6])
        rates = {}
        for key, values in table.items():
            known, count = key.strip("()").rsplit(", ", 1)
            known = known.strip("'")
            if known.startswith(f"{program} (batch size ") and int(count) == gpus:
                rates[int(known.partition(" (batch size ")[2].rstrip(")"))] = values["null"]
        jobs.append(
            Sliced(
                name=str(number),
                program=program,
                batch=int(batch.rstrip(")")),
                gpus=gpus,
                mode=row[7],
                steps=int(row[5]),
                submitted=float(row[11]),
                rates=rates,
            )
        )
    return jobs


def share_in_rounds(jobs: Sequence[Sliced], gpus: int, rule: Slicer) -> float:
    """Run all jobs, and return when the last has ended, in seconds."""
    now, number = min(each.submitted for each in jobs), 0
    while True:
        waiting = [each for each in jobs if each.finished is None and each.submitted <= now]
        for job in waiting:
            job.arrived = now if job.arrived is None else job.arrived
        if not waiting:
            later = [each.submitted for each in jobs if each.finished is None]
            if not later:
                return now
            now = min(later)
            continue
        chosen = rule(now, number, waiting, gpus)
        assert chosen
        assert sum(each.gpus for each in chosen) <= gpus
        length = 0.0
        for job in chosen:
            fresh = number > 0 and job.ran_in != number - 1
            ran = min(job.left_s, ROUND_S)
            lost = PREEMPTION_S if fresh and ran > ROUND_S - 5 else 0.0
            used = job.work(ran - lost)
            job.restarts += fresh
            job.ran_in = number
            job.service_s += used * job.gpus
            length = max(length, ran)
            if job.left_s <= 1e-6:
                job.finished = now + used + lost
        now, number = now + length, number + 1


def find_fairness(job: Sliced, jobs: int, gpus: int) -> float:
    """The finish-time fairness; above 1, the job would have been better off with its share."""
    assert job.finished is not None
    assert job.arrived is not None
    return (job.finished - job.arrived) / (job.alone_s * max(jobs / gpus, 1.0))


def fill(order: Sequence[Sliced], gpus: int) -> Sequence[Sliced]:
    """Return the jobs that run, in this order, as long as they fit."""
    chosen = []
    for job in order:
        if job.gpus <= gpus:
            chosen.append(job)
            gpus -= job.gpus
    return chosen


def run_first(now: float, number: int, waiting: Sequence[Sliced], gpus: int) -> Sequence[Sliced]:
    """First in, first out; smaller jobs go past those that do not fit."""
    return fill(sorted(waiting, key=lambda each: each.submitted), gpus)


def run_least_served(
    now: float, number: int, waiting: Sequence[Sliced], gpus: int
) -> Sequence[Sliced]:
    """The jobs with the least attained service, as the max-min fairness of Gavel (OSDI'20)."""
    return fill(sorted(waiting, key=lambda each: each.service_s), gpus)


def run_shortest(now: float, number: int, waiting: Sequence[Sliced], gpus: int) -> Sequence[Sliced]:
    """The jobs with the least GPU-seconds left."""
    return fill(sorted(waiting, key=lambda each: each.left_s * each.gpus), gpus)


@dataclass(frozen=True)
class SlackFirst:
    """First the jobs that would soon be late for their fair finish time, the one with the least
    slack first; then the longest ones, so that none is left over at the end. The fair finish time
    is that of a job which has its share of the cluster all the time, with `contention` jobs for
    each GPU, and a job is soon late if its slack is less than `slack_s`.

    If not `foresees`, a job is expected to go on with its present batch.
    """

    contention: float
    slack_s: float
    foresees: bool = True

    def __call__(
        self, now: float, number: int, waiting: Sequence[Sliced], gpus: int
    ) -> Sequence[Sliced]:
        return fill(sorted(waiting, key=lambda each: self._rank(each, now)), gpus)

    def _rank(self, job: Sliced, now: float) -> tuple[bool, float]:
        assert job.arrived is not None
        left = job.left_s if self.foresees else job.guess_left_s()
        slack = self.contention * (job.done_s + left) - (now - job.arrived) - left
        return (slack > self.slack_s, slack if slack <= self.slack_s else -left)

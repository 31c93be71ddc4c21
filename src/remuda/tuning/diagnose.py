"""From windows of steps to causes: each cost is the difference between two windows that differ in nothing else."""

from dataclasses import dataclass, field
from statistics import fmean, median, median_low
from typing import Any

from remuda.tuning.paired import Difference, compare
from remuda.tuning.session import Session

LEAST = 0.03  # of a step: what costs less is no cause
MORE_THREADS = 8
LOOKED_AT = 24  # samples that are read alone


@dataclass(frozen=True, slots=True)
class Finding:
    """One cause. `lost_s` is seconds of each step, `half_s` half the width of its 95 % interval."""

    cause: str
    lost_s: float
    half_s: float
    sure: bool  # beyond noise: by Student's t, or in all of at least four pairs
    evidence: str
    fix: str
    change: dict[str, Any] = field(default_factory=dict)  # of the plan, where that is the fix


@dataclass(slots=True)
class Diagnosis:
    facts: dict[str, Any]
    step_s: float
    seconds: dict[str, list[float]]  # of a step, by mode, one for each round
    findings: list[Finding]

    @property
    def steps_per_epoch(self) -> float:
        return float(self.facts["samples"] / self.facts["global_batch"])

    def dollars(self, seconds: float, price: float) -> float:
        """What so many seconds of each step cost in an epoch, at a price an hour of all devices together."""
        return seconds * self.steps_per_epoch * price / 3600


class Doctor:
    """Asks a session for windows, in rounds of all modes, forward and backward in turn."""

    def __init__(self, session: Session, *, steps: int = 13, rounds: int = 5, trace: str = "") -> None:
        self._session, self._steps, self._rounds, self._trace = session, steps, rounds, trace
        self._facts = session.facts
        plan = self._facts["plan"]
        self._group = max(plan["threads"], 1) * max(plan["workers"], 1)
        self._skip = 2 + max(plan["prefetch"], plan["threads"]) + plan["prefetch"] * plan["workers"]
        self._seconds: dict[str, list[float]] = {}
        self._own: list[list[float]] = []  # by window without collectives, by rank: without waiting for others
        self._found: list[Finding] = []

    def diagnose(self) -> Diagnosis:
        facts = self._facts
        on_device = facts["device"] != "cpu"
        self._base = "resident" if on_device else "cached"
        modes = ["", "cached", *(["resident"] if on_device else []), *(["alone"] if facts["ranks"] > 1 else [])]
        share = facts["global_batch"] // facts["ranks"]
        modes.append("double" if facts["micro_batch"] >= share else "larger")
        if facts["tensor_cores"] and facts["plan"]["precision"] == "fp32":
            modes.append("bf16")
        for number in range(self._rounds):
            for mode in modes if number % 2 == 0 else modes[::-1]:
                self._window(mode)
        step = median(self._seconds[""])
        self._judge_data()
        self._judge_ranks()
        python = self._judge_python()
        self._judge_sizes(python, share)
        self._judge_device()
        self._judge_checkpoint(step)
        found = [each for each in self._found if each.sure and each.lost_s > LEAST * step]
        return Diagnosis(facts, step, self._seconds, sorted(found, key=lambda each: -each.lost_s))

    def _window(self, mode: str) -> None:
        told = self._session.measure(mode, steps=self._steps, skip=self._skip if mode == "" else 2)
        self._seconds.setdefault(mode, []).append(fmean(self._typical(each["steps"]) for each in told))
        if mode == "alone":
            ordered = sorted(told, key=lambda each: each.get("rank", 0))
            self._own.append([self._typical(each["own"]) for each in ordered])

    def _typical(self, steps: list[float]) -> float:
        """The middle one of a window; of as many steps together as a loader may make ready at once."""
        size = min(self._group, len(steps))
        return median(fmean(steps[at : at + size]) for at in range(0, len(steps) - size + 1, size))

    def _between(self, first: str, second: str) -> Difference:
        return compare(self._seconds[first], self._seconds[second])

    def _add(self, cause: str, lost: Difference, evidence: str, fix: str, **change: Any) -> None:
        self._found.append(Finding(cause, lost.median, lost.half, lost.is_gain or lost.agree, evidence, fix, change))

    def _judge_data(self) -> None:
        lost = self._between("", "cached")
        if lost.median < LEAST * median(self._seconds[""]) or self._facts["in_memory"]:
            return
        plan = self._facts["plan"]
        look = self._session.ask({"look": LOOKED_AT})[0]
        walls = {name: pair[0] * 1e3 for name, pair in look.items()}
        evidence = "a sample takes " + ", ".join(f"{ms:.2f} ms to {name}" for name, ms in walls.items())
        if not plan["workers"] and plan["threads"] < MORE_THREADS:
            reading = {"threads": MORE_THREADS, "prefetch": MORE_THREADS}
            told = self._session.measure("", steps=self._steps, skip=3 * MORE_THREADS, reading=reading)[0]
            left = fmean(told["steps"]) - median(self._seconds["cached"])
            evidence += f"; with {MORE_THREADS} threads {max(left, 0) * 1e3:.1f} ms of the stall are left"
            if left < 0.5 * lost.median:
                self._add("too few workers", lost, evidence, f"Plan(threads={MORE_THREADS})", **reading)
                return
        cores = max(self._facts["cores"] // self._facts["ranks"], 1)
        slowest = max(walls, key=lambda name: walls[name])
        if slowest == "read" and look["read"][1] < 0.5 * look["read"][0]:
            self._add("slow storage", lost, evidence, "bring the data near, in larger files: `remuda data convert`")
        elif slowest == "collate":
            self._add("slow collation", lost, evidence, "give samples as tensors of one shape, not as lists")
        else:
            fix = f"decode less (convert the data once), or Plan(workers={cores})"
            self._add("slow decode", lost, evidence, fix, workers=cores)

    def _judge_ranks(self) -> None:
        if "alone" not in self._seconds:
            return
        sent = self._between(self._base, "alone")
        text = f"steps without sending gradients take {fmean(self._seconds['alone']) * 1e3:.1f} ms"
        self._add("slow collective", sent, text, "a faster link, fewer ranks, or more samples between two sums")
        slowest = [max(own) for own in self._own]
        others = [float(median_low(own)) for own in self._own]
        ranks = [own.index(max(own)) for own in self._own]
        rank = max(set(ranks), key=ranks.count)
        text = f"rank {rank} takes {fmean(slowest) * 1e3:.1f} ms of its own, the middle one {fmean(others) * 1e3:.1f}"
        self._add("straggler rank", compare(slowest, others), text, f"look at rank {rank}'s machine, or leave it out")

    def _judge_python(self) -> float:
        """Seconds of a step in the user's own Python while no operation runs."""
        base = median(self._seconds[self._base])
        told = self._session.measure(self._base, steps=self._steps, skip=2, sample=True)[0]
        share = sum(part for _, part in told["lines"])
        traced = self._session.measure(self._base, steps=min(self._steps, 6), skip=2, trace=self._trace or "-")[0]
        lost: float = min(traced["idle"], share * told["seconds"], base)
        where, most = told["lines"][0] if told["lines"] else ("", 0.0)
        text = f"{where} is at work {most:.0%} of the time; no operation runs for {traced['idle'] * 1e3:.1f} ms a step"
        self._add("python-bound loop", Difference(lost, 0.0, lost), text, "do it for the whole batch, or less often")
        return lost

    def _judge_sizes(self, python: float, share: int) -> None:
        base = self._seconds[self._base]
        if "double" in self._seconds:
            fixed = compare([2 * each for each in base], self._seconds["double"])
            text = f"twice the batch takes {fmean(self._seconds['double']) / fmean(base):.2f} times as long"
            lost = Difference(fixed.mean - python, fixed.half, fixed.median - python, fixed.agree)
            if lost.median > 0.5 * median(base):
                self._add("tiny batch", lost, text, f"a global batch above {self._facts['global_batch']}")
        else:
            passes = -(-share // self._facts["micro_batch"])
            gain = self._between(self._base, "larger")
            scale = 2 * (passes - 1) / passes
            text = f"{passes} passes a step; half as many take {gain.mean * 1e3:.1f} ms less"
            lost = Difference(gain.mean * scale, gain.half * scale, gain.median * scale, gain.agree)
            self._add("tiny micro-batch", lost, text, "Plan(micro_batch=0) finds the most that fit", micro_batch=0)

    def _judge_device(self) -> None:
        if "resident" in self._seconds:
            pinned = self._facts["plan"]["pin"]
            text = "steps whose batch lies on the device are faster by so much"
            fix = "send less: uint8 images, narrower types" if pinned else "Plan(pin=True)"
            change = {} if pinned else {"pin": True}
            lost = self._between("cached", "resident")
            self._add("host-device copies" if pinned else "no pinned memory", lost, text, fix, **change)
        if "bf16" in self._seconds:
            text = "the same steps under bf16 autocast are faster by so much"
            lost = self._between("resident", "bf16")
            self._add("fp32 on tensor cores", lost, text, "Plan(precision='bf16')", precision="bf16")

    def _judge_checkpoint(self, step: float) -> None:
        interval = self._facts["interval"]
        if not interval:
            return  # chosen by Remuda: at most 1 % of the time
        stalls = []
        for _ in range(self._rounds):
            told = self._session.measure("saving", steps=self._steps, skip=self._skip)
            stalls.append(max(each["parts"]["checkpoint"] for each in told) * self._steps)
        lost = compare([stall * step / max(interval, stall) for stall in stalls], [0.0] * len(stalls))
        text = f"a save keeps the loop waiting for {fmean(stalls) * 1e3:.0f} ms, each {interval:g} s"
        self._add("slow checkpoint", lost, text, "Run(save_every='auto')")

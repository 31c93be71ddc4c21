"""Finds the causes of slow steps. The cost of a cause is the difference between two windows of
steps that differ only in this cause.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from math import inf
from statistics import fmean, median, median_low
from time import monotonic
from typing import Any

from cavvy.capabilities.tuning.findings import (
    LEAST,
    MEMORY,
    CostFinding,
    Diagnosis,
    StepWindow,
    rank_findings,
)
from cavvy.capabilities.tuning.paired import PairedDifference, StepHistory, compare
from cavvy.capabilities.tuning.session import ScriptError, TuningSession, count_ready

MORE_THREADS = 8
MORE_WORKERS = 16  # maximum number of worker processes to try
LOOKED_AT = 24  # number of samples that are read and timed separately
FAR = 4.0  # a stall of more than this many times a batch's read time has another cause
MOST_ROUNDS = 5  # maximum number of rounds, as a multiple of the requested number
LEAST_ROUNDS = 2  # A difference needs at least two pairs of windows.
SEEN = 4  # minimum number of times that a rare event should be observed
LONGEST, LONGEST_S = 500, 30.0  # maximum steps and seconds of a window for rare events
MOST_TRACED = 100  # maximum number of traced steps, whose operations are kept in memory
PAUSES = 3  # number of pauses between two passes that are measured
# A rank is the cause if it waits longer than the median rank by this share of the stall.
ALONE = 0.5


class Diagnoser:
    """Measures windows of a session in rounds. Each round has one window of each mode. Every second
    round has the reverse order of modes.

    At least `rounds` rounds are measured, and further rounds start until `patience_s` seconds have
    passed. After `limit_s` seconds, a round starts only if fewer than LEAST_ROUNDS were measured.
    """

    def __init__(
        self,
        session: TuningSession,
        *,
        steps: int = 13,
        rounds: int = 5,
        trace: str = "",
        patience_s: float = 0.0,
        limit_s: float = inf,
    ) -> None:
        self._limit_s = limit_s
        self._session, self._steps, self._rounds, self._trace = session, steps, rounds, trace
        self._patience_s = patience_s
        self._facts = session.facts
        plan = self._facts["plan"]
        self._group = max(plan["threads"], 1) * max(plan["workers"], 1)
        self._least = 2 + self._facts["staged"]  # steps to skip if reading is not measured
        self._skip = 2 + count_ready(self._facts)
        self._on_host = self._facts["device"] == "cpu"
        self._base = "cached" if self._on_host else "resident"
        self._apart = ("checkpoint", "transfer", "between") if self._on_host else ("checkpoint",)
        self._windows: dict[str, list[StepWindow]] = {}
        self._seconds: dict[str, list[float]] = {}
        self._found: list[CostFinding] = []
        self._every = StepHistory()

    def diagnose(self) -> Diagnosis:
        facts = self._facts
        modes = [
            "",
            "cached",
            *([] if self._on_host else ["resident"]),
            *(["alone"] if facts["ranks"] > 1 else []),
            "own",
        ]
        modes += self._grown()
        if facts["tensor_cores"] and facts["plan"]["precision"] == "fp32":
            modes.append("bf16")
        if "larger" in modes:
            modes.append("own larger")
        began, number = monotonic(), 0
        while number < LEAST_ROUNDS or (
            (spent := monotonic() - began) <= self._limit_s
            and number < (1 if spent >= self._patience_s else MOST_ROUNDS) * self._rounds
        ):
            for mode in modes if number % 2 == 0 else modes[::-1]:
                self._measure(mode)
            number += 1
        step = median(self._seconds[""]) + self._aside()
        self._look_longer(step)
        self._judge_data()
        self._judge_sizes(self._judge_ranks() + self._judge_python())
        self._judge_work()
        self._judge_checkpoint(step)
        self._judge_device()
        step += self._judge_epochs()
        return Diagnosis(facts, step, self._seconds, rank_findings(self._found, step))

    def _grown(self) -> list[str]:
        """Return the mode that measures the gain of a larger batch or micro-batch. Returns [] if a
        larger batch would not fit into memory.
        """
        # whether the micro-batch is the largest that fits into memory
        found = self._facts["plan"]["micro_batch"] == 0
        if self._facts["micro_batch"] >= self._facts["global_batch"] // self._facts["ranks"]:
            # If one rank of a split model runs out of memory, all ranks exit.
            return [] if found and self._facts["split"] and not self._on_host else ["double"]
        return [] if found else ["larger"]

    def _measure(self, mode: str) -> None:
        told = mode.removeprefix("own").strip()
        if told != mode:
            window = self._look(mode, told or self._base, self._steps)
        else:
            window = self._window(mode, skip=self._skip if mode == "" else self._least)
        self._windows.setdefault(mode, []).append(window)
        ranks = range(len(window.ranks))
        self._seconds.setdefault(mode, []).append(
            fmean(self._typical(self._bare(window, rank)) for rank in ranks)
        )

    def _look(self, mode: str, name: str, steps: int) -> StepWindow:
        """Measure how often each line of the user's code runs. The first window has a trace, which
        slows operations down. The times are measured in a second window, which has no trace.
        """
        trace = (self._trace if mode == "own" else "") or "-"
        traced = self._window(name, skip=self._least, steps=self._traceable(steps), trace=trace)
        self._windows.setdefault(f"{mode} traced", []).append(traced)
        return self._window(name, skip=self._least, steps=steps, watch=True)

    def _traceable(self, steps: int) -> int:
        """Return how many steps to trace, at most `steps`: as many as take half of LONGEST_S, but
        at least the usual number of steps of a window."""
        if steps <= self._steps:
            return steps
        seconds = median(
            max(told["seconds"] for told in window.ranks) for window in self._windows["own traced"]
        )
        return max(self._steps, min(steps, MOST_TRACED, int(LONGEST_S / 2 / seconds)))

    def _look_longer(self, step: float) -> None:
        """If a costly event between steps is too rare to have been observed, measure a longer
        window.
        """
        cost = {rank: self._every.mean("between", rank) for rank in range(self._facts["ranks"])}
        period = max(self._every.period("between", rank) for rank in cost)
        steps = min(int(SEEN * period) + 1, LONGEST, int(LONGEST_S / step))
        if (
            max(cost.values()) > LEAST * step
            and self._steps * len(self._windows["own"]) < SEEN * period
        ):
            self._windows["own seldom"] = [
                self._look("own seldom", self._base, max(steps, self._steps))
            ]

    def _bare(self, window: StepWindow, rank: int) -> list[float]:
        """Return the seconds of each step without saves and, on the CPU, without transfers and the
        script's own code. The time of saves, transfers and the script's own code is measured
        directly and subtracted, because no mode can remove them.
        """
        aside = [window.part(name, rank) for name in self._apart if name != "between"]
        aside += [window.between(rank)] if "between" in self._apart else []
        return [step - sum(each) for step, *each in zip(window.steps(rank), *aside, strict=True)]

    def _aside(self) -> float:
        """Return the mean time, in seconds per step, that `_bare` subtracts from the steps."""
        return fmean(
            sum(self._every.mean(name, rank) for name in self._apart)
            for rank in range(self._facts["ranks"])
        )

    def _window(self, mode: str, *, skip: int, steps: int = 0, **more: Any) -> StepWindow:
        window = StepWindow(
            self._session.measure(mode, steps=steps or self._steps, skip=skip, **more)
        )
        is_clean = not more and mode in (
            "",
            self._base,
            "alone",
        )  # In these modes, the user's own code takes as long as usual.
        self._every.add([each["every"] for each in window.ranks], is_clean=is_clean)
        return window

    def _typical(self, steps: Sequence[float], group: int = 0) -> float:
        """Return the median time of a step in a window. The median is computed from the means of
        groups of steps. A group contains as many steps as a loader prepares batches in parallel.
        """
        size = min(group or self._group, len(steps))
        return median(fmean(steps[at : at + size]) for at in range(0, len(steps) - size + 1, size))

    def _gain(self, first: str, second: str) -> PairedDifference:
        return compare(self._seconds[first], self._seconds[second])

    def _add(
        self, cause: str, lost: PairedDifference, evidence: str, fix: str, **change: Any
    ) -> float:
        """Record a cause. Returns the seconds per step that the cause costs."""
        sure = lost.is_gain or lost.agree
        pairs = (lost.low, lost.high) if lost.agree and not lost.is_gain else None
        self._found.append(
            CostFinding(cause, lost.median, lost.half, sure, evidence, fix, change, pairs)
        )
        return max(lost.median, 0.0) if sure else 0.0

    def _judge_data(self) -> None:
        plan = self._facts["plan"]
        waits, seldom = self._data_waits()
        late = waits.index(max(waits))
        lost = self._lost_to_data(seldom[late])
        if lost.median < LEAST * median(self._seconds[""]):
            return
        if self._facts["in_memory"]:
            self._add("slow data in memory", lost, *MEMORY)
            return
        look = self._session.ask({"look": LOOKED_AT})[late]
        walls = {name: seconds * 1e3 for name, (seconds, _) in look.items()}
        if not plan["workers"] and lost.median > FAR * self._batch_s(walls.values()):
            return  # Reading a batch is much faster, so the stall has another cause.
        parts = (f"{ms:.2f} ms to {name}" for name, ms in walls.items())
        evidence = f"a sample takes {', '.join(parts)}"
        others = median_low(waits)
        if waits[late] - others > ALONE * lost.median:
            evidence = (
                f"rank {late} waits {waits[late] * 1e3:.1f} ms a step for its data, but the median "
                f"rank waits {others * 1e3:.1f} ms; {evidence}"
            )
            self._add("straggler rank", lost, evidence, f"check the disk and CPUs of rank {late}")
            return
        more = self._more_readers()
        if more:
            said, told, left = self._try_readers(more)
            evidence += told
            if left > 0.6 * lost.median:
                more = {}
            elif plan["workers"] == 1 or (not plan["workers"] and plan["threads"] <= 1):
                self._add("too few workers", lost, evidence, f"Plan({said})", **more)
                return
        self._name_slowest(lost, evidence, look, more)

    def _data_waits(self) -> tuple[list[float], list[float]]:
        """Return two lists with one entry for each rank: the seconds per step for which the rank
        waits for data, and the seconds per step that are due to rare long stalls.
        """
        windows, ranks = self._windows[""], range(self._facts["ranks"])
        usual = [
            median(self._typical(window.part("data", rank)) for window in windows) for rank in ranks
        ]
        seldom = [self._seldom_stalls(rank, wait) for rank, wait in enumerate(usual)]
        return [wait + more for wait, more in zip(usual, seldom, strict=True)], seldom

    def _batch_s(self, sample_ms: Iterable[float]) -> float:
        """Return the seconds to read one rank's share of a batch, from the time per sample."""
        return sum(sample_ms) / 1e3 * float(self._facts["global_batch"] / self._facts["ranks"])

    def _lost_to_data(self, seldom: float) -> PairedDifference:
        lost = self._gain("", "cached")
        if not seldom:
            return lost
        low, high = lost.low + seldom, lost.high + seldom
        return PairedDifference(
            lost.mean + seldom, lost.half, lost.median + seldom, True, low, high
        )

    def _own_cores(self) -> int:
        return max(int(self._facts["cores"]) // int(self._facts["ranks"]), 1)

    def _more_readers(self) -> dict[str, int]:
        """Return a change of the plan that adds readers, or {} if there are many readers."""
        plan, workers = self._facts["plan"], min(self._own_cores(), MORE_WORKERS)
        if not plan["workers"] and plan["threads"] < MORE_THREADS:
            return {"threads": MORE_THREADS, "prefetch": MORE_THREADS}
        if 0 < plan["workers"] < workers:
            return {"workers": workers, "threads": max(plan["threads"], 2)}
        return {}

    def _try_readers(self, more: dict[str, int]) -> tuple[str, str, float]:
        """Measure the script with more readers. Returns a description of the readers, a sentence
        that states the evidence, and the seconds for which the script still waits for data.
        """
        readers = more.get("workers", 1) * more["threads"]
        skip = 3 * readers + self._facts["staged"]
        told = StepWindow(self._session.measure("", steps=self._steps, skip=skip, reading=more))
        left = max(self._typical(told.steps(), readers) - median(self._seconds["cached"]), 0.0)
        said = ", ".join(f"{name}={number}" for name, number in more.items())
        return said, f"; with {said}, {left * 1e3:.1f} ms of the stall remain", left

    def _name_slowest(
        self, lost: PairedDifference, evidence: str, look: dict[str, Any], more: dict[str, int]
    ) -> None:
        """Record the slowest part of reading a sample as the cause, together with a change that
        hides or removes this cause.
        """
        cores = self._own_cores()
        said = ", ".join(f"{name}={number}" for name, number in more.items())
        hide = f", or read ahead: Plan({said})" if more else ""
        slowest = max(look, key=lambda name: look[name][0])
        if slowest == "read" and look["read"][1] < 0.5 * look["read"][0]:
            kind, fix = (
                "slow storage",
                ("copy the data to a closer disk, in larger files: `cavvy data convert`"),
            )
            fix += hide
        elif slowest == "collate":
            kind, fix = "slow collation", "return samples as tensors of one shape, not as lists"
            fix += hide
        else:
            kind, fix = "slow decode", "decode less: convert the data once, before training"
            fix += hide or f", or Plan(workers={cores})"
            if not more and self._facts["plan"]["workers"] != cores:
                more = {"workers": cores}
        self._add(kind, lost, evidence, fix, **more)

    def _seldom_stalls(self, rank: int, usual: float) -> float:
        """Return the cost of rare waits for data: the mean wait minus `usual`, in seconds."""
        waits = [each for window in self._windows[""] for each in window.part("data", rank)]
        mean = fmean(waits)
        few = sum(1 for each in waits if each > mean) >= SEEN and usual < 0.6 * mean
        return mean - usual if few else 0.0

    def _judge_ranks(self) -> float:
        """Record the cost of sending gradients and of a slow rank. Returns the sum of the two costs
        in seconds per step.
        """
        if "alone" not in self._windows:
            return 0.0
        alone = self._windows["alone"]
        agreeing = median(median(window.shared()) for window in alone)
        agreeing = agreeing if agreeing > LEAST * median(self._seconds[self._base]) else 0.0
        sent = compare(
            [each + agreeing for each in self._seconds[self._base]], self._seconds["alone"]
        )
        text = f"a step that sends no gradients takes {fmean(self._seconds['alone']) * 1e3:.1f} ms"
        fix = "use a faster link or fewer ranks, or sum the gradients over more samples per step"
        explained = self._add("slow collective", sent, text, fix)
        saving = [self._seen(rank)["saving"] for rank in range(self._facts["ranks"])]
        own = [
            [self._typical(window.own(rank, part)) for rank, part in enumerate(saving)]
            for window in alone
        ]
        slowest, others = [max(each) for each in own], [float(median_low(each)) for each in own]
        ranks = [each.index(max(each)) for each in own]
        rank = max(set(ranks), key=ranks.count)
        text = (
            f"rank {rank} computes for {fmean(slowest) * 1e3:.1f} ms a step, the median rank for "
            f"{fmean(others) * 1e3:.1f}"
        )
        fix = f"check rank {rank}'s machine, or train without it"
        return explained + self._add("straggler rank", compare(slowest, others), text, fix)

    def _judge_python(self) -> float:
        """Record the time in which only the user's own Python code runs, on the rank where this
        time is shortest. Returns how much of this time is included in the step times of `_bare`.
        """
        windows = self._windows["own"]
        between, inside = self._seen_between("python"), self._least_own(windows)
        if "own larger" in self._windows:  # a cost per pass is due to the small micro-batch
            less = self._least_own(self._windows["own larger"])
            more = [
                max(self._by_passes() * (a - b), 0.0) for a, b in zip(inside, less, strict=True)
            ]
            once = median(more) if compare(inside, less).is_gain else 0.0
            inside = [max(each - once, 0.0) for each in inside]
        lost = [each + between for each in inside]
        idle = min(told["idle"] for told in self._windows["own traced"][-1].ranks)
        where, most = self._line("python")
        text = (
            f"{where} runs for {most:.0%} of the time; PyTorch is idle for {idle * 1e3:.1f} ms a "
            "step"
        )
        fix = "vectorize this code over the whole batch, or run it less often"
        explained = self._add("python-bound loop", compare(lost, [0.0] * len(lost)), text, fix)
        return max(explained - between, 0.0) if self._on_host else explained

    def _least_own(self, windows: Sequence[StepWindow]) -> list[float]:
        return [min(told["own"] * told["seconds"] for told in window.ranks) for window in windows]

    def _judge_work(self) -> None:
        """Record the cost of operations that the script runs between the parts of a step, for
        example evaluation and metrics.
        """
        if not self._on_host:
            return  # With an accelerator, this time may be a wait for the step itself.
        lost = self._seen_between("work")
        text = (
            f"the operations between steps, at {self._line('work')[0]}, take {lost * 1e3:.1f} ms a "
            "step"
        )
        fix = "run them less often: for example, evaluate every few hundred steps"
        self._add("work between steps", PairedDifference(lost, 0.0, lost, True), text, fix)

    def _judge_epochs(self) -> float:
        """Record the time that the script's own loop takes between two passes over the data, and
        return it in seconds per step. The time between passes must be measured last, because the
        script ends after its last pass.
        """
        told: list[list[dict[str, Any]]] = []
        with suppress(ScriptError):
            while self._facts["loop"] and len(told) < PAUSES:
                told.append(self._session.ask({"epoch": True}))
        told = [
            each for each in told if each[0]["epochs"] > 0
        ]  # 0 epochs mean that the next pass is over other data or belongs to another run.
        if not told:
            return 0.0
        steps = self._facts["samples"] / self._facts["global_batch"]
        longest = [max(each, key=lambda rank: float(rank["pause"])) for each in told]
        lost = median(
            each["pause"] / each["epochs"] / steps for each in longest[1:] or longest
        )  # The first pause includes warm-up.
        line, share = longest[-1]["most"]
        text = (
            f"the script's own loop takes {longest[-1]['pause']:.2f} s from one pass over the "
            "data to the next"
        )
        text += f", {share:.0%} of it at {line}" if line else ", for a save"
        fix = (
            "do this work less often. If it is a save: one `run.batches` over all epochs saves "
            "checkpoints in the background"
        )
        return self._add("work between epochs", PairedDifference(lost, 0.0, lost, True), text, fix)

    def _seen_between(self, kind: str) -> float:
        """Return the seconds per step that the script spends on this kind of work between the parts
        of its steps. If the work occurs in each step, the result is the time on the rank with the
        least of this work. Additional time on other ranks is reported as a slow rank instead. If
        the work occurs only in some steps, the result is the time on the rank with the most work.
        """
        ranks = range(self._facts["ranks"])
        each = [self._between(rank) * self._seen(rank)[kind] for rank in ranks]
        most = each.index(max(each))
        return (
            each[most]
            if self._every.period("between", most) > 1 and self._saw_seldom(most)
            else min(each)
        )

    def _between(self, rank: int) -> float:
        """Return the mean seconds between the parts of a step, including rare events if any were
        observed.
        """
        return self._every.mean("between", rank, seldom=self._saw_seldom(rank))

    def _saw_seldom(self, rank: int) -> bool:
        """Return whether a rare event occurred between the parts of one of the observed steps."""
        for told in (window.ranks[rank] for window in self._looked_at()):
            every = told["every"]["between"]  # This includes the skipped steps at the beginning.
            if max(every[-len(told["steps"]) :]) > self._every.level("between", rank, every):
                return True
        return False

    def _looked_at(self) -> list[StepWindow]:
        """Return the windows in which the code between the parts of a step was sampled."""
        names = ("own", "own seldom", "own seldom traced")
        return [window for name in names for window in self._windows.get(name, [])]

    def _seen(self, rank: int) -> dict[str, float]:
        """Return the share of each kind of work in the time between a step's parts (sum: 1)."""
        told = [window.ranks[rank]["between"] for window in self._looked_at()]
        looks = {name: sum(each[name] for each in told) for name in told[0]}
        return {name: count / max(sum(looks.values()), 1) for name, count in looks.items()}

    def _line(self, kind: str) -> tuple[str, float]:
        """Return the user's line that was sampled most often during work of the kind `kind`, and
        the share of all time in which this line ran.
        """
        found: dict[str, float] = {}
        windows = [*self._windows["own"], *self._windows.get("own seldom", [])]
        for window in windows:
            for line, share in (each for told in window.ranks for each in told["lines"][kind]):
                found[line] = found.get(line, 0.0) + share / len(windows) / len(window.ranks)
        return max(found.items(), key=lambda each: each[1], default=("a line", 0.0))

    @property
    def _passes(self) -> int:
        share, size = (
            int(self._facts["global_batch"]) // int(self._facts["ranks"]),
            int(self._facts["micro_batch"]),
        )
        return -(-share // max(size, 1))

    def _by_passes(self) -> float:
        """Return the factor from the gain measured with fewer passes to the gain of one pass."""
        return (self._passes - 1) / max(self._passes - self._fewer, 1)

    @property
    def _fewer(self) -> int:
        share = int(self._facts["global_batch"]) // int(self._facts["ranks"])
        return -(-share // max(int(self._windows["larger"][0].ranks[0]["micro_batch"]), 1))

    def _judge_sizes(self, fixed: float) -> None:
        """Record a batch or micro-batch that is too small. `fixed` is the part of a step's time, in
        seconds, that is already explained and does not grow with the batch.
        """
        base = self._seconds[self._base]
        if self._ran_out():
            return
        if "double" in self._seconds:
            alike = compare([2 * each - fixed for each in base], self._seconds["double"])
            text = (
                "a step with twice the batch takes "
                f"{fmean(self._seconds['double']) / fmean(base):.2f} times as long"
            )
            if alike.median > 0.5 * median(base):
                self._add(
                    "tiny batch",
                    alike,
                    text,
                    f"use a global batch above {self._facts['global_batch']}",
                )
        elif "larger" in self._seconds:
            gain, scale = self._gain(self._base, "larger"), self._by_passes()
            text = f"a step has {self._passes} passes; {self._fewer} save {gain.mean * 1e3:.1f} ms"
            lost = compare(
                *([each * scale for each in self._seconds[mode]] for mode in (self._base, "larger"))
            )
            self._add(
                "tiny micro-batch",
                lost,
                text,
                "Plan(micro_batch=0) finds the largest micro-batch that fits",
                micro_batch=0,
            )

    def _ran_out(self) -> bool:
        """Return whether the script continued with a smaller micro-batch because a larger batch or
        micro-batch did not fit into memory.
        """
        share, size = (
            self._facts["global_batch"] // self._facts["ranks"],
            self._facts["micro_batch"],
        )
        return any(
            told["micro_batch"] < min(times * size, share)
            for mode, times in (("double", 1), ("larger", 2))
            for window in self._windows.get(mode, [])
            for told in window.ranks
        )

    def _judge_device(self) -> None:
        text = "a step takes less time if the batch is already on the device"
        fix = "send fewer bytes: for example, images as uint8"
        if "resident" in self._seconds:
            pinned = self._facts["plan"]["pin"]
            change = {} if pinned else {"pin": True}
            cause = "host-device copies" if pinned else "no pinned memory"
            self._add(
                cause,
                self._gain("cached", "resident"),
                text,
                fix if pinned else "Plan(pin=True)",
                **change,
            )
        else:  # No transfer runs in the background, so the clock of the host measures it.
            sent = [median(window.part("transfer")) for window in self._windows["cached"]]
            self._add(
                "host-device copies",
                compare(sent, [0.0] * len(sent)),
                "the host spends time on copying batches to the device",
                fix,
            )
        if "bf16" in self._seconds:
            text = "the same steps take less time under bf16 autocast"
            lost = self._gain("resident", "bf16")
            self._add(
                "fp32 on tensor cores", lost, text, "Plan(precision='bf16')", precision="bf16"
            )

    def _judge_checkpoint(self, step: float) -> None:
        """Record the cost of saves. If the script's own saves are costly, their cost is recorded;
        otherwise the cost of the saves that the run makes at its interval is measured separately.
        """
        ranks, fix = range(self._facts["ranks"]), "Run(save_every='auto')"
        by_hand = [self._between(rank) * self._seen(rank)["saving"] for rank in ranks]
        asked = max(self._every.mean("checkpoint", rank) + by_hand[rank] for rank in ranks)
        if asked > LEAST * step:
            lost = PairedDifference(asked, 0.0, asked, True)
            where = (
                f", most of it at {self._line('saving')[0]}" if max(by_hand) > 0.5 * asked else ""
            )
            self._add(
                "slow checkpoint",
                lost,
                f"the script's own saves take {asked * 1e3:.1f} ms a step{where}",
                fix,
            )
            return
        interval = self._facts["interval"]
        if interval is None:
            return  # The automatic interval already limits the cost to 1 % of the time.
        stalls = []
        for _ in range(self._rounds):
            told = self._session.measure("saving", steps=self._steps, skip=self._skip)
            stalls.append(max(sum(each["parts"]["checkpoint"]) for each in told))
        lost = compare(
            [stall * step / max(interval, step) for stall in stalls], [0.0] * len(stalls)
        )
        text = (
            f"a save blocks the training loop for {fmean(stalls) * 1e3:.0f} ms, every {interval:g} "
            "s"
        )
        self._add("slow checkpoint", lost, text, fix)

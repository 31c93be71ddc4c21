"""Tries changes of a plan or of a plain loop, one at a time. The changed script and the best script
so far are measured alternately, and the change is kept if the changed script is faster.

The settings that can change in a plain training loop are the levers, each with the lines of the
script that make a change permanent.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import fmean, median
from time import monotonic
from typing import Any

from cavvy.capabilities.tuning.paired import PairedDifference, compare
from cavvy.capabilities.tuning.session import (
    ScriptEnded,
    ScriptError,
    TimeLimitReached,
    TuningSession,
    count_ready,
)


@dataclass(frozen=True, slots=True)
class PlanTrial:
    """One change that was tried, and its result. Times are seconds per step, as medians over all
    windows.
    """

    change: dict[str, Any]
    exact: bool  # whether the results of training stay equal in every bit
    before_s: float
    after_s: float
    gain: PairedDifference | None  # None if the script did not run with the change
    kept: bool
    error: str = ""


class PlanTuner:
    """Finds a faster plan for a script. For a script with a plain loop, `plan` contains the chosen
    levers (see `cavvy.capabilities.tuning.tune`).

    Raises: ScriptError: the script does not run even without a change.
    """

    def __init__(
        self,
        script: str,
        arguments: Sequence[str] = (),
        *,
        ranks: int = 1,
        pairs: int = 6,
        steps: int = 10,
        numerics: bool = False,
        until: float = inf,
        begun: Callable[[dict[str, Any]], None] = lambda _: None,
    ) -> None:
        self._until = until  # the time limit, on the monotonic clock
        self._begun = begun  # a function that is called with each change before it is tried
        self._script, self._arguments, self._ranks = script, arguments, ranks
        self._pairs, self._steps, self._numerics = pairs, steps, numerics
        self.is_over = False  # whether the time limit ended the trials
        self.trials: list[PlanTrial] = []
        self.facts: dict[str, Any] = {}
        self.plan: dict[str, Any] = {}
        self.before_s = self.after_s = 0.0

    @property
    def is_faster(self) -> bool:
        return any(each.kept for each in self.trials)

    @property
    def is_plain(self) -> bool:
        return bool(self.facts.get("plain"))

    def run(self) -> Iterator[PlanTrial]:
        """Try changes until the time limit, and yield each trial when it is complete."""
        best = self._start(None)
        try:
            self.facts = best.facts
            if not self.is_plain:
                # The plan is valid for any number of ranks.
                self.plan = {**self.facts["plan"], "replicas": 0}
            self.before_s = self.after_s = self._measure(best)
            for change, exact in list_changes(self.facts, numerics=self._numerics):
                if self._is_known(change):
                    continue
                if monotonic() > self._until:
                    self.is_over = True
                    break
                self._begun(change)
                trial, best = self._try(best, change, exact)
                self.trials.append(trial)
                yield trial
        finally:
            best.close()

    def _is_known(self, change: dict[str, Any]) -> bool:
        """Return whether to skip the change, because the plan already contains it or because an
        earlier change of the batch size brought no gain.
        """
        if "batch_size" in change:
            return any("batch_size" in each.change and not each.kept for each in self.trials)
        return all(self.plan.get(name) == value for name, value in change.items())

    def _try(
        self, best: TuningSession, change: dict[str, Any], exact: bool
    ) -> tuple[PlanTrial, TuningSession]:
        """Try a change. Returns the trial, and the session of the faster plan. The session of the
        slower plan is closed.
        """
        plan = {**self.plan, **change}
        if (
            exact and not self.is_plain
        ):  # The micro-batch is kept, because summing in another order would change the last bits.
            plan["micro_batch"] = plan["micro_batch"] or self.facts["micro_batch"]
        try:
            other = self._start(plan)
        except ScriptError as error:
            return PlanTrial(change, exact, self.after_s, 0.0, None, False, _short(error)), best
        try:
            if self.is_plain and "compile" in change:
                # This compiles the model for batches of other sizes, such as the last one.
                self._measure(other)
            before, after = self._alternate(best, other)
        except ScriptError as error:
            other.close()
            return PlanTrial(change, exact, self.after_s, 0.0, None, False, _short(error)), best
        gain = compare(before, after)
        trial = PlanTrial(change, exact, median(before), median(after), gain, gain.is_gain)
        loser, winner = (best, other) if gain.is_gain else (other, best)
        loser.close()
        if gain.is_gain:
            self.after_s = self.after_s * trial.after_s / trial.before_s
            self.plan = {**self.plan, **change}
        return trial, winner

    def _alternate(
        self, first: TuningSession, second: TuningSession
    ) -> tuple[list[float], list[float]]:
        """Measure both sessions in the order ABBA..., so that slow changes of the machine's speed
        affect both sessions equally. If the first session fails, for example because the two
        sessions do not fit into memory together, the second session is closed. The first session is
        then started again for the next trials.
        """
        seconds: dict[int, list[float]] = {0: [], 1: []}
        for number in range(self._pairs):
            for which in (0, 1) if number % 2 == 0 else (1, 0):
                session = (first, second)[which]
                try:
                    seconds[which].append(self._measure(session))
                except TimeLimitReached:
                    raise
                except ScriptError:
                    if session is first:
                        second.close()
                        first.restart()
                    raise
        return seconds[0], seconds[1]

    def _measure(self, session: TuningSession) -> float:
        """Return the mean seconds per step in one window. If a change altered the number of samples
        in a step, the measured seconds are converted to the seconds for the original number of
        samples. If a plain loop has ended, the script is started again.
        """
        skip = 2 + count_ready(session.facts)
        try:
            told = session.measure(steps=self._steps, skip=skip)
        except ScriptEnded:
            session.restart()
            told = session.measure(steps=self._steps, skip=skip)
        share: float = self.facts["global_batch"] / session.facts["global_batch"]
        return fmean(each["seconds"] for each in told) * share

    def _start(self, plan: dict[str, Any] | None) -> TuningSession:
        levers: dict[str, Any] = {}
        if self.is_plain:
            loader = self.facts["loader"] or {"number": -1}
            levers, plan = {**(plan or {}), "loader": loader["number"]}, None
        return TuningSession(
            self._script,
            self._arguments,
            ranks=self._ranks,
            plan=plan,
            until=self._until,
            levers=levers,
        )


def list_changes(facts: dict[str, Any], *, numerics: bool) -> list[tuple[dict[str, Any], bool]]:
    """Return the changes to try, in order. Each change has a flag that says whether the results of
    training stay exactly equal. If `numerics` is false, only changes that keep the results exactly
    equal are returned.
    """
    is_plain = facts.get("plain")
    exact = (list_exact_levers if is_plain else _list_exact)(facts)
    other = (list_other_levers if is_plain else _list_numerics)(facts) if numerics else ()
    return [(change, True) for change in exact] + [(change, False) for change in other]


def _list_exact(facts: dict[str, Any]) -> Iterator[dict[str, Any]]:
    plan = facts["plan"]
    cores = max(facts["cores"] // facts["ranks"], 1)
    if not facts["in_memory"]:
        for threads in (4, 16):
            yield {"threads": threads, "prefetch": max(threads, plan["prefetch"])}
        for workers in sorted({cores, max(cores // 2, 1)}):
            yield {"workers": workers, "threads": 2}
        yield {"prefetch": 8}
    if facts["device"] != "cpu":
        yield {"pin": True}
    if plan["recompute"]:
        yield {"recompute": False}


def _list_numerics(facts: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if facts["tensor_cores"] and facts["plan"]["precision"] in ("fp32", "tf32"):
        yield from ({"precision": each} for each in ("tf32", "bf16"))
    if facts["device"] != "cpu":
        yield {"channels_last": True}
    yield {"compile": True}
    if facts["tensor_cores"]:
        yield {"precision": "fp8"}
    share = -(-facts["global_batch"] // facts["ranks"])
    for size in sorted({min(facts["micro_batch"] * 2, share), share}):
        if size != facts["micro_batch"]:
            yield {"micro_batch": size}


def _short(error: ScriptError) -> str:
    return str(error).splitlines()[0][:200]


GROWTHS = (2, 4, 8)  # batch sizes to try, as multiples of the script's own batch size


def list_exact_levers(facts: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the changes that do not alter results. Results change only if the data set draws random
    numbers.
    """
    loader = facts["loader"]
    if loader is None:
        return
    cores = max(facts["cores"] // facts["ranks"], 1)
    if not loader["iterable"]:
        for workers in sorted({cores, max(cores // 2, 1)}):
            if workers != loader["workers"]:
                yield {"workers": workers}
    if facts["device"] != "cpu" and not loader["pin"]:
        yield {"pin": True}


def list_other_levers(facts: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the changes that alter results."""
    if facts["tensor_cores"] and facts["precision"] in ("fp32", "tf32"):
        if facts["precision"] == "fp32":
            yield {"precision": "tf32"}
        yield {"precision": "bf16"}
    if facts["images"]:
        yield {"channels_last": True}
    if not facts["compiled"]:
        yield {"compile": True}
    loader = facts["loader"]
    if loader is not None and loader["batch_size"]:
        for growth in GROWTHS:
            if growth * loader["batch_size"] * facts["ranks"] <= loader["samples"]:
                yield {"batch_size": growth * loader["batch_size"]}


def describe_levers(chosen: dict[str, Any], facts: dict[str, Any]) -> list[str]:
    """Return one line for each chosen lever: the change to the script that has the same effect."""
    loader = facts["loader"] or {"line": ""}
    at, call = show_line(loader["line"]), show_line(facts["model_line"])
    kind = facts["device"]
    texts = {
        "workers": f"{at}: DataLoader(..., num_workers={chosen.get('workers')})",
        "pin": f"{at}: DataLoader(..., pin_memory=True), and copy each batch with "
        ".to(device, non_blocking=True)",
        "channels_last": "before the optimizer is created: "
        "model.to(memory_format=torch.channels_last)",
        "compile": "before the loop: model.compile()",
    }
    if "batch_size" in chosen:
        texts["batch_size"] = f"{at}: " + _describe_batch(chosen["batch_size"], loader)
    if chosen.get("precision") == "tf32":
        texts["precision"] = 'before the loop: torch.set_float32_matmul_precision("high")'
    else:
        texts["precision"] = (
            f"{call}: compute this forward pass and the loss, but not the backward pass, within "
            f'`with torch.autocast("{kind}", torch.bfloat16):`'
        )
    return [texts[name] for name in chosen]


def _describe_batch(size: int, loader: dict[str, Any]) -> str:
    growth = size // loader["batch_size"]
    text = f"DataLoader(..., batch_size={size})"
    if loader["reads"] % growth == 0:
        rest = loader["reads"] // growth
        return f"{text}, and one optimizer step after {rest} instead of {loader['reads']} batches"
    return (
        f"{text}; a step then learns from {growth} times as many samples, so adapt the learning "
        "rate and the number of steps"
    )


def list_fixed(facts: dict[str, Any]) -> list[str]:
    """Return the settings that `tune` cannot change from outside the script, each with the line of
    the script to change.
    """
    loader, call = facts["loader"], show_line(facts["model_line"])
    if loader is None:
        return [
            f"workers, pinning and batch size: the batches for {call} do not come from a "
            "DataLoader; use one, or change the batch size in the code that creates the batches"
        ]
    at, found = show_line(loader["line"]), []
    if loader["iterable"]:
        found.append(
            f"workers: {at} reads an IterableDataset, which repeats its samples in each worker; "
            "divide them with torch.utils.data.get_worker_info(), and then set num_workers"
        )
    if not loader["batch_size"]:
        found.append(
            f"batch size: {at} has no batch_size, because its data set or its batch_sampler "
            "creates the batches; change the size there"
        )
    return found


def show_line(line: str) -> str:
    """Return a line of the script as NAME:NUMBER; "the script" if the line is unknown."""
    return Path(line).name if line else "the script"

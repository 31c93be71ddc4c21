"""Tries changes of a plan or of a plain loop, one at a time. The changed script and the best script
so far are measured alternately, and the change is kept if the changed script is faster.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from statistics import fmean, median
from time import monotonic
from typing import Any

from cavvy.tuning.levers import list_exact_levers, list_other_levers
from cavvy.tuning.paired import PairedDifference, compare
from cavvy.tuning.session import (
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
    levers (see `cavvy.tuning.levers`).

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

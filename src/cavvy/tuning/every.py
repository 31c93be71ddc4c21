"""The history of step times. The cost of an event that occurs only in some steps is spread over all
steps.
"""

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import NamedTuple

FAR = 3.0  # a step that takes more than this many times the usual time contains a rare event


class StepSample(NamedTuple):
    seconds: float
    is_clean: bool
    is_far: bool  # whether the step took much longer than the others


class StepHistory:
    """All steps of a session, in order. Steps that a trace slowed down are counted, but the times
    of these steps are not used.
    """

    def __init__(self) -> None:
        self._windows: list[tuple[bool, list[dict[str, list[float]]]]] = []

    def add(self, ranks: list[dict[str, list[float]]], *, is_clean: bool) -> None:
        """Add the next steps. For each rank, `ranks` has a dictionary that maps the name of a part
        to the part's seconds in each step. `is_clean` is true if no trace slowed the steps down.
        """
        self._windows.append((is_clean, ranks))

    def mean(self, name: str, rank: int, *, seldom: bool = True) -> float:
        """Return the mean seconds per step. For a part that occurs in every step, the result is the
        median, because other programs on this machine hardly affect the median. For a part that
        occurs only in some steps, the result is the mean. The mean includes rare events unless
        `seldom` is False. All windows contribute to the rate of rare events.
        """
        steps = self._steps(name, rank)
        clean, far = (
            [each.seconds for each in steps if each.is_clean],
            [each for each in steps if each.is_far],
        )
        if _is_usual(clean) and (not far or _is_usual([each.seconds for each in steps])):
            return median(clean)
        rest = [each.seconds for each in steps if each.is_clean and not each.is_far]
        if not far or not rest:
            return fmean(clean)
        if not seldom:
            return fmean(rest)
        rate = 1 / _period(steps)
        long = [each.seconds for each in far if each.is_clean] or [each.seconds for each in far]
        return rate * fmean(long) + (1 - rate) * fmean(rest)

    def period(self, name: str, rank: int) -> float:
        """Return the mean number of steps from one rare event to the next, or 1 without rare
        events. A rare event is a step for which `is_far` is true.
        """
        steps = self._steps(name, rank)
        is_seldom = any(each.is_far for each in steps) and not _is_usual(
            [each.seconds for each in steps]
        )
        return _period(steps) if is_seldom else 1.0

    def level(self, name: str, rank: int, window: Sequence[float] = ()) -> float:
        """Return the limit for rare events, in seconds: a step that takes longer than the limit
        contains a rare event. `window` contains the steps of one window, if given. The steps of
        `window` can raise the limit but not lower it, because a trace may have slowed these steps
        down.
        """
        every = [each for _, ranks in self._windows for each in ranks[rank][name]]
        usual = median(
            each for is_clean, ranks in self._windows if is_clean for each in ranks[rank][name]
        )
        return max(fmean(every), FAR * usual, FAR * median(window) if window else 0.0)

    def _steps(self, name: str, rank: int) -> list[StepSample]:
        steps, level = [], self.level(name, rank)
        for is_clean, ranks in self._windows:
            seconds = ranks[rank][name]
            least = level if is_clean else self.level(name, rank, seconds)
            steps += [StepSample(each, is_clean, each > least) for each in seconds]
        return steps


def _period(steps: Sequence[StepSample]) -> float:
    """Return the mean number of steps from one rare event to the next. If the events are regular,
    only the steps between the first and the last event are used, because the steps before and after
    belong to incomplete periods.
    """
    far = [place for place, each in enumerate(steps) if each.is_far]
    gaps = [after - before for before, after in pairwise(far)]
    if len(far) > 2 and 2 * min(gaps) >= max(*gaps, far[0], len(steps) - 1 - far[-1]):
        return (far[-1] - far[0]) / len(gaps)
    return len(steps) / len(far)


def _is_usual(steps: Sequence[float]) -> bool:
    """Return whether the median is close to the mean. A median close to the mean represents the
    steps well.
    """
    return 0.6 * fmean(steps) <= median(steps) <= 1.1 * fmean(steps)

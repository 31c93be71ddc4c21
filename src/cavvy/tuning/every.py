"""What each step took, one after the other: what comes in few of them alone has its cost in
each, too.
"""

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import NamedTuple

FAR = 3.0  # times what a step takes usually: something else came


class StepSample(NamedTuple):
    seconds: float
    is_clean: bool
    is_far: bool  # it took far longer than others


class StepHistory:
    """All steps of a session, in order; those that something slows down count, but say nothing
    of how long.
    """

    def __init__(self) -> None:
        self._windows: list[tuple[bool, list[dict[str, list[float]]]]] = []

    def add(self, ranks: list[dict[str, list[float]]], *, is_clean: bool) -> None:
        """Seconds by name of the steps that follow those added before, of each rank."""
        self._windows.append((is_clean, ranks))

    def mean(self, name: str, rank: int, *, seldom: bool = True) -> float:
        """Seconds of a step, however seldom they come: how often is told by all steps, in whatever
        windows these fall. Of what comes in each step the middle one, which does not tell of other
        programs' work on this machine. Without what comes `seldom`, the mean of the other steps.
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
        """In how many steps it comes once; 1 where it comes in each, or in none."""
        steps = self._steps(name, rank)
        is_seldom = any(each.is_far for each in steps) and not _is_usual(
            [each.seconds for each in steps]
        )
        return _period(steps) if is_seldom else 1.0

    def level(self, name: str, rank: int, window: Sequence[float] = ()) -> float:
        """From how many seconds on something else came in a step; of a `window` that a closer look
        may slow down all over, by its own steps too.
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
    """Where it comes regularly, from the first time to the last: steps before and after these
    are part of a period.
    """
    far = [place for place, each in enumerate(steps) if each.is_far]
    gaps = [after - before for before, after in pairwise(far)]
    if len(far) > 2 and 2 * min(gaps) >= max(*gaps, far[0], len(steps) - 1 - far[-1]):
        return (far[-1] - far[0]) / len(gaps)
    return len(steps) / len(far)


def _is_usual(steps: Sequence[float]) -> bool:
    """Whether the middle one tells what the others are like."""
    return 0.6 * fmean(steps) <= median(steps) <= 1.1 * fmean(steps)

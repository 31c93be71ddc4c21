"""The statistics of measured steps: paired differences and the history of step times.

Two variants are measured alternately, so that other programs on the machine affect both variants
equally. The cost of an event that occurs only in some steps is spread over all steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, sqrt
from statistics import fmean, median, stdev
from typing import NamedTuple

# Two-sided 95 % quantiles of Student's t for 1, 2, 3, ... degrees of freedom (Fisher and Yates,
# Statistical Tables, table III).
_T = (
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
    2.228,
    2.201,
    2.179,
    2.160,
    2.145,
    2.131,
    2.120,
    2.110,
    2.101,
    2.093,
    2.086,
    2.080,
    2.074,
    2.069,
    2.064,
    2.060,
    2.056,
    2.052,
    2.048,
    2.045,
    2.042,
)

# Number of pairs. If two variants are equal, the second one is lower in all of these pairs with a
# probability of only 1/32 (the sign test).
AGREE = 5


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """The difference between two variants: the value of the first variant minus the value of the
    second variant. `mean` is the mean over all pairs, and `half` is half the width of its 95 %
    confidence interval.
    """

    mean: float
    half: float
    median: float = 0.0
    # whether there are at least `AGREE` pairs and the second variant is lower in all of them
    agree: bool = False
    low: float = 0.0  # the smallest difference in a pair
    high: float = 0.0  # the largest difference in a pair

    @property
    def is_gain(self) -> bool:
        """Whether the difference is larger than the noise."""
        return self.mean > self.half


def compare(first: Sequence[float], second: Sequence[float]) -> PairedDifference:
    """Compare two variants by the differences within pairs. With few pairs, the confidence interval
    is wide; with one pair, it is infinite.
    """
    gains = [a - b for a, b in zip(first, second, strict=True)]
    if len(gains) < 2:
        return PairedDifference(fmean(gains), inf, median(gains))
    t = _T[min(len(gains) - 1, len(_T)) - 1]
    half, agree = t * stdev(gains) / sqrt(len(gains)), len(gains) >= AGREE and min(gains) > 0
    return PairedDifference(fmean(gains), half, median(gains), agree, min(gains), max(gains))


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

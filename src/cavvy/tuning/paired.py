"""Paired differences. Two variants are measured alternately, so that other programs on the machine
affect both variants equally.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt
from statistics import fmean, median, stdev

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

    @property
    def is_loss(self) -> bool:
        return -self.mean > self.half


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

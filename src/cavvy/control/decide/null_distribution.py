"""The null distribution of a sequential test's statistic. The distribution contains only the
outcomes of the trial in which the test was still running, because no earlier look rejected the
hypothesis.

A sequential test of a fixed length updates its null distribution at each look (Armitage, McPherson
and Rowe, "Repeated significance tests on accumulating data", Journal of the Royal Statistical
Society A 132, 1969). At each look, the new observations are added to the distribution. Then the
outcomes are removed in which the statistic is so large that this look rejects the hypothesis. The
total probability of the removed outcomes is the probability of a false alarm.
"""

from collections.abc import Sequence
from itertools import accumulate
from math import exp, inf, log, sqrt

from cavvy.domain.service_updates import NullDistribution
from cavvy.domain.values import replace

_SMALLEST = 1e-8  # a smaller probability at the lower end is added to the next value's
_SMALLEST_RATIO = 1e-13  # of an increment's probability to that of the most probable one
_REACH = 5.0  # standard deviations of an increment that are considered
_NARROW = 0.5  # the variance below which an increment has three values


class Increment:
    """The distribution of an increment of a statistic: `masses[i]` is the probability of
    `first + i`."""

    __slots__ = ("first", "masses")

    def __init__(self, first: int, masses: Sequence[float]) -> None:
        total = sum(masses)
        self.first, self.masses = first, [each / total for each in masses]


def draw_failed(new: int, old: int, failed: int) -> Increment:
    """Return a hypergeometric distribution. There are `new` and `old` requests, of which `failed`,
    chosen at random, fail; the distribution is that of the number of failures among the `new`
    requests.
    """
    most, least = min(failed, new), max(0, failed - old)
    mode = min(most, max(least, (failed + 1) * (new + 1) // (new + old + 2)))
    above, below, mass = [1.0], [], 1.0
    for each in range(mode, most):
        mass *= (failed - each) * (new - each) / ((each + 1) * (old - failed + each + 1))
        if mass < _SMALLEST_RATIO:
            break
        above.append(mass)
    first, mass = mode, 1.0
    for each in range(mode, least, -1):
        mass *= each * (old - failed + each) / ((failed - each + 1) * (new - each + 1))
        if mass < _SMALLEST_RATIO:
            break
        below.append(mass)
        first = each - 1
    return Increment(first, below[::-1] + above)


def draw_normal(variance: float) -> Increment:
    """Return the distribution of a normal increment with this variance, rounded to integers."""
    if variance < _NARROW:
        return Increment(-1, [variance / 2, 1 - variance, variance / 2])
    reach = int(_REACH * sqrt(variance)) + 1
    masses = [exp(-each * each / (2 * variance)) for each in range(reach + 1)]
    return Increment(-reach, masses[:0:-1] + masses)


def add(known: NullDistribution, increment: Increment) -> NullDistribution:
    """Return the distribution of the statistic after an independent increment."""
    size = len(known.masses)
    found = [0.0] * (size + len(increment.masses) - 1)
    for at, mass in enumerate(increment.masses):
        part = found[at : at + size]
        found[at : at + size] = [
            each + mass * other for each, other in zip(part, known.masses, strict=True)
        ]
    start, low = 0, 0.0
    while low + found[start] < _SMALLEST:
        low += found[start]
        start += 1
    found[start] += low
    return replace(known, first=known.first + increment.first + start, masses=tuple(found[start:]))


def list_tails(known: NullDistribution) -> list[float]:
    """Return, for each value, the probability that the statistic is at least that value."""
    return list(accumulate(reversed(known.masses)))[::-1]


def find_tail(known: NullDistribution, value: int) -> float:
    """Return the probability that the statistic is at least `value`."""
    return sum(known.masses[max(0, value - known.first) :])


def find_bound(known: NullDistribution, allowed: float) -> int:
    """Return the smallest number for which the probability that the statistic is at least this
    number is at most `allowed`.
    """
    tail, at = 0.0, len(known.masses)
    while at and tail + known.masses[at - 1] <= allowed:
        at -= 1
        tail += known.masses[at]
    return known.first + at


def remove_from(known: NullDistribution, bound: int) -> NullDistribution:
    """Return the distribution without the outcomes in which the statistic reaches the bound. In
    these outcomes, the look has rejected the hypothesis, and the test has ended.
    """
    size = max(1, bound - known.first)
    return replace(known, masses=known.masses[:size], spent=known.spent + sum(known.masses[size:]))


def tilt(known: NullDistribution, odds: float) -> NullDistribution:
    """Return the distribution (noncentral hypergeometric) that `known` becomes if the new revision
    is worse: a failed request then belongs to the new revision with `odds` times the odds.
    """
    # in logarithms, because a product of thousands of odds, or a mass of a tail, is 0 as a float
    step = log(odds)
    weights = [
        log(mass) + step * index if mass > 0 else -inf for index, mass in enumerate(known.masses)
    ]
    most = max(weights)
    found = [exp(each - most) for each in weights]
    total = sum(found)
    return replace(known, masses=tuple(each / total for each in found))

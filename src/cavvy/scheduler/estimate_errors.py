"""Learns from earlier estimates of starts how much wider or narrower a range must be. The module
does no I/O.

This is conformalized quantile regression (Romano, Patterson and Candes, 2019), with one correction
for each end of the range (their asymmetric variant), on the logarithm of the wait: each of the
latest estimates says by which factor the end of its range would have been right. Only those count
whose median is nearest, because short and long waits go wrong for different reasons.
"""

from collections.abc import Sequence
from math import ceil, exp, log

from cavvy.domain.values import Struct
from cavvy.scheduler.start_estimates import StartEstimate

LATEST = 300  # estimates that count
_NEAREST = 100  # of them that count for one estimate
_FEWEST = 20  # estimates from which on a range is corrected
_MISSED = 0.05  # the part of starts that may lie before, and of those that may lie after the range
_SHORT_S = 30.0  # differences of waits that are much shorter than this do not matter


class EstimateOutcome(Struct, frozen=True):
    """An estimate without corrections, and after how many seconds the work started. If it has not
    `started` yet, it will wait for longer than `wait_s`."""

    estimate: StartEstimate
    wait_s: float
    started: bool = True


def correct(estimate: StartEstimate, outcomes: Sequence[EstimateOutcome]) -> StartEstimate:
    """Return the estimate with the range that contains the start in 90 of 100 cases, by the
    outcomes of earlier estimates."""
    known = [each for each in outcomes if each.started or each.wait_s > each.estimate.high_s]
    if len(known) < _FEWEST:
        return estimate
    median_s = _scale(estimate.median_s)
    known.sort(key=lambda each: abs(_scale(each.estimate.median_s) - median_s))
    known = known[:_NEAREST]
    late = _find_edge([_scale(each.wait_s) - _scale(each.estimate.high_s) for each in known])
    early = _find_edge([_scale(each.estimate.low_s) - _scale(each.wait_s) for each in known])
    shifts = sorted(_scale(each.wait_s) - _scale(each.estimate.median_s) for each in known)
    low = _unscale(_scale(estimate.low_s) - early)
    high = _unscale(_scale(estimate.high_s) + late)
    median = _unscale(_scale(estimate.median_s) + shifts[len(shifts) // 2])
    return StartEstimate(min(low, median), median, max(high, median))


def _find_edge(errors: Sequence[float]) -> float:
    place = ceil((len(errors) + 1) * (1 - _MISSED)) - 1
    return sorted(errors)[min(place, len(errors) - 1)]


def _scale(seconds: float) -> float:
    return log(max(0.0, seconds) + _SHORT_S)


def _unscale(value: float) -> float:
    return max(0.0, exp(value) - _SHORT_S)

"""The cold starts of replicas, as measured in each market."""

from cavvy.domain.values import Struct

# the weight of the newest measurement, and the step by which the high quantile follows it
_NEWEST = 0.2
_QUANTILE, _STEP = 0.9, 0.1


class ColdStart(Struct, frozen=True, kw_only=True):
    """The mean of the last cold starts of a market, and the time that nine of ten stay below."""

    mean_s: float
    high_s: float


def record_cold_starts(before: ColdStart | None, measured_s: tuple[float, ...]) -> ColdStart | None:
    """The cold start with the new measurements: an exponentially weighted mean, and a quantile that
    moves up a large step or down a small one.
    """
    for each_s in measured_s:
        if before is None:
            before = ColdStart(mean_s=each_s, high_s=each_s)
            continue
        step_s = _STEP * before.mean_s
        above = each_s > before.high_s
        before = ColdStart(
            mean_s=before.mean_s + _NEWEST * (each_s - before.mean_s),
            high_s=before.high_s + step_s * (_QUANTILE if above else _QUANTILE - 1),
        )
    return before

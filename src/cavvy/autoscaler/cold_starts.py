"""The cold starts of replicas, as measured in each market."""

from collections.abc import Iterable, Mapping, Sequence

from cavvy.autoscaler.observations import MarketObservation
from cavvy.domain.values import Struct

# the weight of the newest measurement, and the step by which the high quantile follows it
_NEWEST = 0.2
_QUANTILE, _STEP = 0.9, 0.1


class ColdStart(Struct, frozen=True, kw_only=True):
    """The mean and the 90th percentile of the last cold starts of a market."""

    mean_s: float
    high_s: float


def record_cold_starts(before: ColdStart | None, measured_s: tuple[float, ...]) -> ColdStart | None:
    """Return the record `before`, updated with new measurements. The mean is weighted
    exponentially. The quantile increases in large steps and decreases in small steps.
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


def expect_cold_start(
    measured: Mapping[str, ColdStart], markets: Sequence[MarketObservation], assumed_s: float
) -> float:
    """Return the shortest mean cold start of the markets, in seconds."""
    return min((_mean(measured, market, assumed_s) for market in markets), default=assumed_s)


def list_starts(
    measured: Mapping[str, ColdStart], markets: Iterable[MarketObservation], assumed_s: float
) -> list[float]:
    """Return the number of seconds after which each starting replica will be ready. A replica is
    omitted if it has been starting for more than twice the 90th percentile of cold starts, because
    the replica may never be ready.
    """
    found = []
    for market in markets:
        known = measured.get(market.name)
        longest_s = 2 * (assumed_s if known is None else known.high_s)
        mean_s = _mean(measured, market, assumed_s)
        found += [max(0.0, mean_s - age_s) for age_s in market.starting_s if age_s <= longest_s]
    return found


def _mean(measured: Mapping[str, ColdStart], market: MarketObservation, assumed_s: float) -> float:
    known = measured.get(market.name)
    return assumed_s if known is None else known.mean_s

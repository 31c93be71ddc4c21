"""The cold starts of replicas: measured in some markets, and estimated for the others."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

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
    """Return the expected time in seconds until a replica that is ordered now is ready. The result
    is the mean over all markets, because the spot policy chooses the market of a replica by its
    losses and refusals, and not by its speed.
    """
    if not markets:
        return assumed_s
    return fmean(_estimate(measured, each, markets, assumed_s).mean_s for each in markets)


def list_starts(
    measured: Mapping[str, ColdStart], markets: Sequence[MarketObservation], assumed_s: float
) -> list[float]:
    """Return the number of seconds after which each starting replica will be ready. A replica is
    omitted if it has been starting for more than twice the 90th percentile of cold starts, because
    the replica may never be ready.
    """
    found = []
    for market in markets:
        expected = _estimate(measured, market, markets, assumed_s)
        longest_s = 2 * expected.high_s
        found += [
            max(0.0, expected.mean_s - age_s) for age_s in market.starting_s if age_s <= longest_s
        ]
    return found


def _estimate(
    measured: Mapping[str, ColdStart],
    market: MarketObservation,
    markets: Sequence[MarketObservation],
    assumed_s: float,
) -> ColdStart:
    """Return the measured cold start of the market. If none was measured, the result is the boot
    time of the market's machines, plus the time that the service itself needs. The latter is the
    mean over the measured markets, or the assumed time if no market was measured.
    """
    if (known := measured.get(market.name)) is not None:
        return known
    near = list(_find_nearest(measured, market, markets))
    if not near:
        return ColdStart(mean_s=market.boot_s + assumed_s, high_s=market.boot_s + assumed_s)
    return ColdStart(
        mean_s=market.boot_s + fmean(max(0.0, each.mean_s - boot_s) for each, boot_s in near),
        high_s=market.boot_s + fmean(max(0.0, each.high_s - boot_s) for each, boot_s in near),
    )


def _find_nearest(
    measured: Mapping[str, ColdStart],
    market: MarketObservation,
    markets: Sequence[MarketObservation],
) -> Iterator[tuple[ColdStart, float]]:
    """Yield the measured cold starts that are most similar to those of the market, each with the
    boot time of its market: the ones in its region, otherwise the ones of its provider, otherwise
    all. Images, networks and disks differ less within a region than between providers.
    """
    known = {each.name: each for each in markets if each.name in measured}
    region, provider = market.region, market.region.partition("/")[0]
    nearest = (
        [name for name, each in known.items() if region and each.region == region]
        or [
            name
            for name, each in known.items()
            if provider and each.region.partition("/")[0] == provider
        ]
        or list(measured)
    )
    for name in nearest:
        yield measured[name], known[name].boot_s if name in known else 0.0

"""Represents recorded markets as a list of changes. The readers create the list of changes; the
driver processes the changes in order.
"""

from bisect import bisect_right
from collections.abc import Sequence

from cavvy.domain.values import Struct
from cavvy.planner.spot.view import PolicyMarket, SpotQuote


class MarketSeries(Struct, frozen=True, kw_only=True):
    """The record of one market. From the time i x `gap_s` on, `counts[i]` spot nodes are available,
    each for `usd_hr[i]` dollars per hour.
    """

    market: PolicyMarket
    gap_s: float
    counts: Sequence[int]
    usd_hr: Sequence[float]

    @property
    def length_s(self) -> float:
        return min(len(self.counts), len(self.usd_hr)) * self.gap_s


class TraceWorld(Struct, frozen=True, kw_only=True):
    """The quotes of all markets over time: `quotes[i]` is valid from `times_s[i]` to
    `times_s[i + 1]`.
    """

    markets: tuple[PolicyMarket, ...]
    times_s: tuple[float, ...]
    quotes: tuple[tuple[SpotQuote, ...], ...]
    end_s: float
    move_usd: tuple[tuple[float, ...], ...] = ()

    def at(self, time_s: float) -> int:
        """Return the index of the quotes that are valid at this time."""
        return max(bisect_right(self.times_s, time_s) - 1, 0)


def make_world(
    series: Sequence[MarketSeries], nodes: int = 1, move_usd: tuple[tuple[float, ...], ...] = ()
) -> TraceWorld:
    """Merge the records of several markets into one list of changes. A market has spot capacity
    while at least `nodes` spot nodes are available.
    """
    end_s = min(one.length_s for one in series)
    moments: dict[float, None] = {0.0: None}
    for one in series:
        before: SpotQuote | None = None
        for index in range(round(end_s / one.gap_s)):
            quote = _quote(one, index, nodes)
            if quote != before:
                moments[index * one.gap_s] = None
                before = quote
    times = tuple(sorted(moments))
    quotes = tuple(
        tuple(_quote(one, int(time / one.gap_s + 1e-9), nodes) for one in series) for time in times
    )
    return TraceWorld(
        markets=tuple(one.market for one in series),
        times_s=times,
        quotes=quotes,
        end_s=end_s,
        move_usd=move_usd,
    )


def _quote(series: MarketSeries, index: int, nodes: int) -> SpotQuote:
    return SpotQuote(series.counts[index] >= nodes, series.usd_hr[index])

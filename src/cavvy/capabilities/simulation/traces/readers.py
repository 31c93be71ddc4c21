"""Reads the public trace formats (availability counts with `gap_seconds`, price series, and tables
of egress prices) into recorded markets: a list of changes, which the driver processes in order.
"""

import csv
import json
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from math import inf
from pathlib import Path
from typing import TypeGuard, cast

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


class TraceError(ValueError):
    """Raised if a trace cannot be read. The message names the file, the position in the file, and
    the expected content.
    """


def list_traces(paths: Iterable[Path]) -> list[Path]:
    """Return all given trace files, and all trace files in and below the given folders. The files
    of each folder are sorted by name.
    """
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise TraceError(
                f"{path}: no such file or folder; expected a trace (JSON with gap_seconds) or a "
                "folder of traces"
            )
        found += sorted(path.rglob("*.json")) if path.is_dir() else [path]
    if not found:
        raise TraceError(
            f"no trace in {', '.join(map(str, paths))}; expected *.json with metadata.gap_seconds "
            "and data"
        )
    return found


def read_series(
    path: Path,
    *,
    spot_ratio: float = 0.3,
    on_demand_usd_hr: float = 1.0,
    prices: Sequence[float] | None = None,
) -> MarketSeries:
    """Read the availability of one market. The market's spot prices are `prices` or, if `prices` is
    None, the prices in the trace. If the trace contains no prices, the spot prices are `spot_ratio`
    times the on-demand price.
    """
    document = _read_object(path)
    metadata, data = document.get("metadata"), document.get("data")
    gap = metadata.get("gap_seconds") if isinstance(metadata, dict) else None
    if not isinstance(gap, int | float) or not 0 < gap < inf:
        raise TraceError(f"{path}: metadata.gap_seconds: expected a number above 0, not {gap!r}")
    if not isinstance(data, list) or not data:
        raise TraceError(f"{path}: data: expected a list with the numbers of available instances")
    for index, count in enumerate(data):
        if not isinstance(count, int) or count < 0:
            raise TraceError(f"{path}: data[{index}]: expected a count of 0 or more, not {count!r}")
    own = document.get("prices")
    if own is not None and (not _are_prices(own) or len(own) != len(data)):
        raise TraceError(
            f"{path}: prices: expected {len(data)} prices in US dollars per hour, one for each "
            "value in `data`"
        )
    if prices is None:
        prices = own
    name = path.stem
    return MarketSeries(
        market=PolicyMarket(name=name, region=region_of(name), on_demand_usd_hr=on_demand_usd_hr),
        gap_s=float(gap),
        counts=cast(list[int], data),
        usd_hr=prices if prices is not None else [spot_ratio * on_demand_usd_hr] * len(data),
    )


def read_prices(path: Path) -> dict[str, list[float]]:
    """Read the spot price of each market in each tick, in US dollars per hour:
    {"us-east-1a_v100_1": [1.67, …], …}.
    """
    document = _read_object(path)
    for name, values in document.items():
        if not _are_prices(values):
            raise TraceError(f"{path}: {name}: expected a list of prices in US dollars per hour")
    return cast(dict[str, list[float]], document)


def read_egress(path: Path) -> dict[tuple[str, str], float]:
    """Read the egress prices in US dollars per GB, by (from region, to region)."""
    with path.open(newline="") as file:
        rows = csv.DictReader(file)
        try:
            return {
                (row["from_region"], row["to_region"]): float(row["price_usd_per_gb"])
                for row in rows
            }
        except (KeyError, TypeError, ValueError) as error:
            raise TraceError(
                f"{path}: expected the columns from_region, to_region and price_usd_per_gb: {error}"
            ) from None


def move_prices(
    markets: Sequence[PolicyMarket], egress: dict[tuple[str, str], float], size_gb: float
) -> tuple[tuple[float, ...], ...]:
    """Return the price of copying a checkpoint between each pair of markets. A copy within a region
    is free, and so is a copy between regions that are not in `egress`.
    """
    return tuple(
        tuple(
            0.0
            if one.region == other.region
            else size_gb * egress.get((one.region, other.region), 0.0)
            for other in markets
        )
        for one in markets
    )


def region_of(name: str) -> str:
    """Return the region in the name of a trace: "us-east-1a_v100_1" -> "us-east-1";
    "us-central1-b_a100" -> "us-central1".
    """
    zone = name.partition("_")[0]
    if zone[-1:].isalpha() and zone[-2:-1].isdigit():
        return zone[:-1]
    head, _, tail = zone.rpartition("-")
    return head if len(tail) == 1 and tail.isalpha() else zone


def _are_prices(values: object) -> TypeGuard[list[float]]:
    return isinstance(values, list) and all(
        isinstance(value, int | float) and 0 <= value < inf for value in values
    )


def _read_object(path: Path) -> dict[str, object]:
    try:
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise TraceError(f"{path}: the file cannot be read: {error.strerror}") from None
    except ValueError:
        hint = "expected a trace: a JSON object with gap_seconds and data"
        raise TraceError(f"{path}: not a JSON file; {hint}") from None
    if not isinstance(document, dict):
        raise TraceError(f"{path}: expected an object, not {type(document).__name__}")
    return cast(dict[str, object], document)

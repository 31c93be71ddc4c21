"""Reads recorded spot capacity as markets for replicas."""

from collections.abc import Sequence
from pathlib import Path

from cavvy.sim.serving.service import ReplicaMarket
from cavvy.sim.traces.readers import list_traces, read_series


def read_spot_markets(folder: Path, usd_hr: float) -> Sequence[ReplicaMarket]:
    """Return one market for each recording in the folder; all markets have the same price. Raises
    TraceError.
    """
    return [
        ReplicaMarket(
            name=series.market.name,
            region=series.market.region,
            spot=True,
            usd_hr=usd_hr,
            capacity=tuple(series.counts),
            step_s=series.gap_s,
        )
        for series in map(read_series, list_traces([folder]))
    ]

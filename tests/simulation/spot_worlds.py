"""Made-up recorded markets for the tests of the trace simulator."""

import random
from collections.abc import Sequence
from pathlib import Path

from cavvy.capabilities.simulation.traces.readers import MarketSeries, TraceWorld, make_world
from cavvy.planner.spot.view import JobTerms, PolicyMarket

HOUR = 3600.0


def market(
    counts: str,
    rate: float = 0.3,
    gap_s: float = HOUR,
    name: str = "zone-1a_gpu_1",
    region: str = "zone-1",
) -> MarketSeries:
    """A market from a drawing: "##.." is there for two ticks and away for two."""
    marks = [int(mark == "#") for mark in counts]
    return MarketSeries(
        market=PolicyMarket(name=name, region=region),
        gap_s=gap_s,
        counts=marks,
        usd_hr=[rate] * len(marks),
    )


def world(*series: MarketSeries, moves: tuple[tuple[float, ...], ...] = ()) -> TraceWorld:
    return make_world(series, move_usd=moves)


def random_world(seed: int, markets: int = 1, ticks: int = 400, gap_s: float = 600.0) -> TraceWorld:
    """Markets whose spot comes and goes in spells of heavy-tailed lengths; some never have any,
    some always.
    """
    source = random.Random(seed)
    series = []
    for index in range(markets):
        stays, away = source.choice(
            [(0.0, 1.0), (1.0, 0.0), *[(source.uniform(1, 40), source.uniform(1, 40))] * 6]
        )
        drawn: list[str] = []
        while len(drawn) < ticks:
            for mark, mean in (("#", stays), (".", away)):
                drawn += mark * (max(1, int(mean * source.paretovariate(1.3) / 3)) if mean else 0)
        series.append(
            market(
                "".join(drawn[:ticks]),
                rate=source.choice([0.1, 0.3, 0.7, 1.2]),
                gap_s=gap_s,
                name=f"z-{index}a",
                region=f"z-{index}",
            )
        )
    moves = tuple(
        tuple(0.0 if one == other else 0.2 for other in range(markets)) for one in range(markets)
    )
    return make_world(series, move_usd=moves)


def terms(made: TraceWorld, work: float, deadline: float, overhead: float) -> JobTerms:
    """Terms in hours."""
    return JobTerms(
        work_s=work * HOUR,
        deadline_s=deadline * HOUR,
        overhead_s=overhead * HOUR,
        markets=made.markets,
        move_usd=made.move_usd,
    )


def write_trace(path: Path, counts: Sequence[int], gap_s: int = 600) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{{"metadata": {{"gap_seconds": {gap_s}}}, "data": {list(counts)}}}')
    return path

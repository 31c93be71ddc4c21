"""Measures the production deadline policy on made-up markets of kinds that nobody tuned it on.

    python benchmarks/unseen.py              # 24 jobs for each row
    python benchmarks/unseen.py --jobs 100   # more jobs, other markets

Each figure is the total cost of the policy divided by the total cost of the best simple policy
(on-demand, greedy or uniform progress) with the same knowledge and the same margins. The jobs have
ten hours of work and deadlines of 1.02 to 5 times the work. On-demand costs one dollar per hour.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from random import Random

from cavvy.capabilities.simulation.traces.driver import NO_MARGINS, Knows, run_job
from cavvy.capabilities.simulation.traces.readers import MarketSeries, TraceWorld, make_world
from cavvy.planner.deadline.policy import PolicyMargins
from cavvy.planner.spot.classic import find_policy
from cavvy.planner.spot.view import JobTerms, PolicyMarket

HOUR, GAP_S, TICKS, JOBS, WORK_HR = 3600.0, 300.0, 800, 24, 10.0
RATIOS = (0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95)  # prices of spot divided by on-demand's
FACTORS = (1.02, 1.05, 1.2, 1.5, 2.0, 3.0, 5.0)
OVERHEADS_HR = (0.05, 0.2)
SIMPLE = ("on-demand", "greedy", "uniform-progress")
SETTINGS: Mapping[str, tuple[Knows, PolicyMargins]] = {
    "told everything": (Knows.EVERYTHING, NO_MARGINS),
    "as production": (Knows.LAUNCHES, NO_MARGINS),
    "with margins": (Knows.LAUNCHES, PolicyMargins(again_s=600.0)),
}
WorldMaker = Callable[[Random], TraceWorld]


def flapping(source: Random, ratios: Sequence[float] = RATIOS) -> TraceWorld:
    """Spot that never stays or stays away for long."""
    counts = _spells(source, source.uniform(2, 12), source.uniform(1, 16))
    return make_world([_series(counts, [source.choice(ratios)] * TICKS, 0)])


def steady(source: Random, ratios: Sequence[float] = RATIOS) -> TraceWorld:
    """Spot that is mostly available, and away for a few hours now and then."""
    return make_world([_series(_spells(source, 200, 30), [source.choice(ratios)] * TICKS, 0)])


def correlated(source: Random) -> TraceWorld:
    """Three regions that mostly lose spot at the same time; copies between them cost money."""
    common, ratio = _spells(source, 40, 25), source.choice(RATIOS)
    series = []
    for index in range(3):
        counts = [a * b for a, b in zip(common, _spells(source, 60, 20), strict=True)]
        series.append(_series(counts, [min(0.95, ratio * source.uniform(1, 1.1))] * TICKS, index))
    moves = tuple(tuple(0.0 if a == b else 0.3 for b in range(3)) for a in range(3))
    return make_world(series, move_usd=moves)


def price_spikes(source: Random) -> TraceWorld:
    """Two regions in which spot stays, but sometimes costs more than on-demand for hours."""
    series = []
    for index in range(2):
        calm, spikes = source.choice(RATIOS), _spells(source, 20, 120)
        usd_hr = [source.uniform(1.0, 2.0) if spike else calm for spike in spikes]
        series.append(_series(_spells(source, 120, 15), usd_hr, index))
    return make_world(series)


def equal_prices(source: Random) -> TraceWorld:
    """Spot that costs exactly as much as on-demand in one of two regions, or in both."""
    ratios = source.choice([(1.0, 1.0), (1.0, 0.5), (0.95, 1.0)])
    return make_world(
        [_series(_spells(source, 50, 20), [each] * TICKS, i) for i, each in enumerate(ratios)]
    )


KINDS: Mapping[str, WorldMaker] = {
    "flapping": flapping,
    "steady": steady,
    "correlated regions": correlated,
    "price spikes": price_spikes,
    "equal prices": equal_prices,
    **{f"flapping, spot at {ratio}": partial(flapping, ratios=(ratio,)) for ratio in RATIOS},
    **{f"steady, spot at {ratio}": partial(steady, ratios=(ratio,)) for ratio in RATIOS},
}


def compare(kind: str, setting: str, jobs: int = JOBS) -> tuple[float, int]:
    """The cost divided by that of the best simple policy, and the number of missed deadlines."""
    knows, margins = SETTINGS[setting]
    usd: Counter[str] = Counter()
    missed = 0
    for world, job in _draw(KINDS[kind], f"{kind.partition(',')[0]}/{jobs}", jobs):
        for name in ("auto", *SIMPLE):
            run = run_job(world, 0.0, job, find_policy(name), knows=knows, margins=margins)
            usd[name] += run.usd
            missed += run.missed and name == "auto"
    return usd["auto"] / min(usd[name] for name in SIMPLE), missed


def _draw(make: WorldMaker, seed: str, jobs: int) -> Iterator[tuple[TraceWorld, JobTerms]]:
    source = Random(seed)
    for _ in range(jobs):
        world, factor = make(source), source.choice(FACTORS)
        overhead_hr = source.choice(OVERHEADS_HR)
        yield (
            world,
            JobTerms(
                work_s=WORK_HR * HOUR,
                deadline_s=(WORK_HR * factor + overhead_hr) * HOUR,
                overhead_s=overhead_hr * HOUR,
                markets=world.markets,
                move_usd=world.move_usd,
            ),
        )


def _spells(source: Random, stays: float, away: float) -> list[int]:
    """1 for each tick of a period with spot, 0 without. Lengths are exponential, with these means
    in ticks; it is random whether spot is there at first.
    """
    drawn, up = list[int](), source.choice([0, 1])
    while len(drawn) < TICKS:
        drawn += [up] * max(1, round(source.expovariate(1 / (stays if up else away))))
        up = 1 - up
    return drawn[:TICKS]


def _series(counts: Sequence[int], usd_hr: Sequence[float], index: int) -> MarketSeries:
    market = PolicyMarket(name=f"z-{index}a", region=f"z-{index}")
    return MarketSeries(market=market, gap_s=GAP_S, counts=counts, usd_hr=usd_hr)


def run_unseen() -> Iterator[Mapping[str, object]]:
    """Yield a row for each kind of market and each setting."""
    for kind in KINDS:
        for setting in SETTINGS:
            ratio, missed = compare(kind, setting)
            yield {
                "kind": kind.replace(",", ":"),
                "setting": setting,
                "jobs": JOBS,
                "ratio": f"{ratio:.4f}",
                "missed": missed,
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--jobs", type=int, default=JOBS, help="jobs for each row")
    options = parser.parse_args()
    print(f"| markets | {' | '.join(SETTINGS)} |\n|---|{'---|' * len(SETTINGS)}")
    missed = 0
    for kind in KINDS:
        found = [compare(kind, setting, options.jobs) for setting in SETTINGS]
        missed += sum(late for _, late in found)
        print(f"| {kind} | {' | '.join(f'{ratio:.3f}' for ratio, _ in found)} |", flush=True)
    print(f"{missed} of {len(KINDS) * len(SETTINGS) * options.jobs} deadlines missed")


if __name__ == "__main__":
    main()

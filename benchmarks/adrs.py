"""Measures `auto`, told everything, on the two spot benchmarks of ADRS (AI-Driven Research for
Systems, "Can't Be Late"): the mean dollars of a job with 48 hours of work.

    python benchmarks/adrs.py --traces FOLDER    # with the traces of ADRS's simulators
    python benchmarks/adrs.py                    # without them: the same zones in February 2023

FOLDER is the folder `data` into which ADRS's two archives `real_traces.tar.gz` are unpacked: it has
the folders `real` and `converted_multi_region_aligned`. The jobs, zones, prices and means are those
of ADRS's evaluators, so the figures can be compared with the bars. Our simulator moves from change
to change, theirs in ticks.

Without FOLDER, windows of ../shared/data (or CAVVY_DATA) are drawn instead, at the same time in all
zones. There are no K80 traces in it, so the figure for one market has only V100 zones, and neither
figure can be compared with a bar, only with the other policies in its row.
"""

import argparse
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from statistics import fmean

from cavvy.capabilities.simulation.traces.driver import run_job
from cavvy.capabilities.simulation.traces.readers import (
    MarketSeries,
    TraceError,
    make_world,
    read_series,
)
from cavvy.domain.values import replace
from cavvy.planner.spot.classic import find_policy
from cavvy.planner.spot.view import JobTerms

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("CAVVY_DATA", ROOT.parent / "shared" / "data"))
V100 = DATA / "traces/spot/availability/aws-02-15-2023"
HOUR, SEED, WORK_HR = 3600.0, 2026, 48.0
ON_DEMAND_USD, SPOT_USD = 3.06, 0.9731  # ADRS's prices for all devices
POLICIES = ("auto", "uniform-progress", "greedy")
# the figures to be below, told everything
BARS = {"single": 95.07, "multi": 73.0}
DEADLINES_HR, OVERHEADS_HR = (52.0, 70.0, 92.0), (0.02, 0.2, 0.4)
SINGLE_ZONES = ("us-west-2a_k80_1", "us-west-2b_k80_1", "us-west-2a_v100_1", "us-west-2b_v100_1")
SINGLE_WINDOWS = 30  # traces of each zone and overhead, evenly spaced over the files
MULTI_DEADLINE_HR, MULTI_OVERHEAD_HR = 52.0, 0.2
NINE = (
    *("us-east-2a", "us-west-2c", "us-east-1d", "us-east-2b", "us-west-2a"),
    *("us-east-1f", "us-east-1a", "us-west-2b", "us-east-1c"),
)
# the zones of each set of markets, and the number of traces
SETS: Mapping[str, tuple[Sequence[str], int]] = {
    "2 zones, one region": (("us-east-1a", "us-east-1c"), 8),
    "2 regions": (("us-east-2a", "us-west-2a"), 8),
    "3 regions": (("us-east-1a", "us-east-2b", "us-west-2c"), 6),
    "3 zones, one region": (("us-east-1a", "us-east-1c", "us-east-1d"), 6),
    "5 zones": (("us-east-1a", "us-east-1f", "us-west-2a", "us-west-2b", "us-east-2b"), 4),
    "9 zones": (NINE, 2),
}
Windows = Iterator[Sequence[MarketSeries]]
_Dollars = dict[str, list[float]]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--traces", type=Path, help="the folder `data` of ADRS's simulators")
    parser.add_argument("--repeat", type=int, default=1, help="times as many drawn windows")
    options = parser.parse_args(arguments)
    print(f"| dollars | {' | '.join(POLICIES)} | bar |\n|---|{'---|' * (len(POLICIES) + 1)}")
    missed = print_single(options.traces, options.repeat)
    missed += print_multi(options.traces, options.repeat)
    print(f"{missed} deadlines of `auto` missed")


def print_single(folder: Path | None, repeat: int) -> int:
    """One market: every zone, deadline and overhead. Returns the missed deadlines of `auto`."""
    usd, missed = {name: list[float]() for name in POLICIES}, 0
    for overhead in OVERHEADS_HR:
        for zone in SINGLE_ZONES:
            if folder is None and "k80" in zone:
                continue
            for series in _single_windows(folder, zone, overhead, repeat):
                for deadline in DEADLINES_HR:
                    missed += _run(series, deadline, overhead, usd)
    name = "one market" if folder else "one market, V100 zones only"
    _print(name, {each: fmean(usd[each]) for each in POLICIES}, BARS["single"] if folder else None)
    return missed


def print_multi(folder: Path | None, repeat: int) -> int:
    """Several markets: the mean over the sets. Returns the missed deadlines of `auto`."""
    means, missed = {name: list[float]() for name in POLICIES}, 0
    for label, (zones, count) in SETS.items():
        usd = {name: list[float]() for name in POLICIES}
        for series in _multi_windows(folder, zones, count * (1 if folder else repeat)):
            missed += _run(series, MULTI_DEADLINE_HR, MULTI_OVERHEAD_HR, usd)
        for name in POLICIES:
            means[name].append(fmean(usd[name]))
        _print(label, {name: fmean(usd[name]) for name in POLICIES}, None)
    every = {name: fmean(means[name]) for name in POLICIES}
    _print("several markets", every, BARS["multi"] if folder else None)
    return missed


def _run(
    series: Sequence[MarketSeries],
    deadline_hr: float,
    overhead_hr: float,
    usd: dict[str, list[float]],
) -> int:
    world = make_world(series)
    terms = JobTerms(
        work_s=WORK_HR * HOUR,
        deadline_s=deadline_hr * HOUR,
        overhead_s=overhead_hr * HOUR,
        markets=world.markets,
    )
    missed = 0
    for name in POLICIES:
        ran = run_job(world, 0.0, terms, find_policy(name))
        usd[name].append(ran.usd)
        missed += ran.missed and name == "auto"
    return missed


def _single_windows(folder: Path | None, zone: str, overhead: float, repeat: int) -> Windows:
    if folder is None:
        yield from _drawn([zone], max(DEADLINES_HR), SINGLE_WINDOWS * repeat, f"{overhead}")
        return
    part = f"real/ddl=search+task=48+overhead={overhead:.2f}/real/{zone}/traces/random_start"
    read = [_read_theirs(path) for path in sorted((folder / part).glob("*.json"), key=str)]
    long = [each for each in read if each.length_s >= max(DEADLINES_HR) * HOUR]
    if not long:
        hours = max(DEADLINES_HR)
        raise TraceError(f"{folder / part}: expected traces of at least {hours:g} hours")
    last, picks = len(long) - 1, min(SINGLE_WINDOWS, len(long))
    for index in range(picks):
        yield [long[round(index * last / max(1, picks - 1))]]


def _multi_windows(folder: Path | None, zones: Sequence[str], count: int) -> Windows:
    names = [f"{zone}_v100_1" for zone in zones]
    if folder is None:
        yield from _drawn(names, MULTI_DEADLINE_HR, count, "multi")
        return
    for index in range(count):
        paths = [
            folder / "converted_multi_region_aligned" / name / f"{index}.json" for name in names
        ]
        yield [_named(_read_theirs(path), name) for path, name in zip(paths, names, strict=True)]


def _drawn(names: Sequence[str], hours: float, count: int, seed: str) -> Windows:
    """Windows of the recorded zones at random times, the same for all of them."""
    zones = [
        read_series(
            V100 / f"{name}.json",
            on_demand_usd_hr=ON_DEMAND_USD,
            spot_ratio=SPOT_USD / ON_DEMAND_USD,
        )
        for name in names
    ]
    random, ticks = Random(f"{SEED}/{seed}/{names}"), round(hours * HOUR / zones[0].gap_s) + 1
    for _ in range(count):
        at = random.randrange(min(len(zone.counts) for zone in zones) - ticks)
        part = slice(at, at + ticks)
        yield [replace(z, counts=z.counts[part], usd_hr=z.usd_hr[part]) for z in zones]


def _read_theirs(path: Path) -> MarketSeries:
    """Read a trace of ADRS, in which 1 means that spot is unavailable. Its spot price is the first
    price of the trace if it has prices, for the whole trace.
    """
    read = read_series(path, on_demand_usd_hr=ON_DEMAND_USD, spot_ratio=SPOT_USD / ON_DEMAND_USD)
    own = json.loads(path.read_bytes()).get("prices")
    usd_hr = [own[0] if own else SPOT_USD] * len(read.counts)
    return replace(read, counts=[int(not count) for count in read.counts], usd_hr=usd_hr)


def _named(series: MarketSeries, name: str) -> MarketSeries:
    region = name.partition("_")[0][:-1]
    return replace(series, market=replace(series.market, name=name, region=region))


def _print(label: str, usd: Mapping[str, float], bar: float | None) -> None:
    cells = " | ".join(f"{usd[name]:.2f}" for name in POLICIES)
    print(f"| {label} | {cells} | {'' if bar is None else f'< {bar:g}'} |", flush=True)


if __name__ == "__main__":
    main()

"""Measures the production deadline policy on recorded spot markets, in three columns: with full
information, with the information that production has, and in addition with production's margins.

    python benchmarks/spot.py                    # every table on the tuning month, a small sample
    python benchmarks/spot.py single regions     # these tables
    python benchmarks/spot.py --test             # on the test months, which never tune a policy
    python benchmarks/spot.py --windows 20       # more windows for each row (default 3)

Tuning uses February 2023 alone; the test months are April and August 2023. The traces are read from
../shared/data, or CAVVY_DATA. Each figure is the total cost divided by the total optimum, and in
the table `prices` by the cost of the best simple policy with the same knowledge.

`benchmarks/policies.py held-out` stores one row for each job of the test months, for the page.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

from cavvy.capabilities.simulation.traces.driver import NO_MARGINS, Knows, run_job
from cavvy.capabilities.simulation.traces.optimum import find_optimum
from cavvy.capabilities.simulation.traces.readers import (
    MarketSeries,
    TraceWorld,
    make_world,
    move_prices,
    read_egress,
    read_prices,
    read_series,
)
from cavvy.domain.values import replace
from cavvy.planner.deadline.policy import PolicyMargins
from cavvy.planner.spot.classic import find_policy
from cavvy.planner.spot.view import JobTerms

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("CAVVY_DATA", ROOT.parent / "shared" / "data"))
SPOT = DATA / "traces/spot"
TUNING = ("availability/aws-02-15-2023",)
TEST = ("preemption/1-node/aws-04-22-2023", "preemption/4-node/aws-08-03-2023")
HOUR, ON_DEMAND_USD, SEED = 3600.0, 3.06, 2026
TRIPLE = ("us-east-1c", "us-east-2b", "us-west-2a")  # SkyNomad's three V100 zones
COLUMNS: Mapping[str, tuple[Knows, PolicyMargins]] = {
    "told everything": (Knows.EVERYTHING, NO_MARGINS),
    "as production": (Knows.LAUNCHES, NO_MARGINS),
    "with margins": (Knows.LAUNCHES, PolicyMargins(again_s=600.0)),
}
SIMPLE = ("on-demand", "greedy", "uniform-progress")
HELD_OUT_WINDOWS = 20
# the columns' names in the stored runs
STORED = dict(zip(("auto", "auto-launches", "auto-margins"), COLUMNS, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One job in one window of recorded markets."""

    row: str
    world: TraceWorld
    start_s: float
    terms: JobTerms


@cache
def _zones(folder: str) -> tuple[MarketSeries, ...]:
    """The zones of one month with their prices; zones without prices cost 0.3 of on-demand."""
    known = read_prices(DATA / "prices/v100_prices/v100_spot_prices.json")
    return tuple(
        read_series(
            path,
            on_demand_usd_hr=ON_DEMAND_USD,
            spot_ratio=0.3,
            prices=known.get(path.stem) if folder in TUNING else None,
        )
        for path in sorted((SPOT / folder).glob("*.json"))
    )


def _world(zones: Sequence[MarketSeries], size_gb: float = 50.0) -> TraceWorld:
    egress = read_egress(DATA / "prices/v100_prices/aws_egress_pricing.csv")
    return make_world(zones, move_usd=move_prices([z.market for z in zones], egress, size_gb))


def _case(
    row: str, world: TraceWorld, random: Random, hours: tuple[float, float, float], gap_s: float
) -> Case:
    """A job at a random time, with these hours of work, deadline and overhead. Times are rounded to
    whole ticks, which makes the optimum quick to compute.
    """
    work_s, deadline_s, overhead_s = (max(1, round(each * HOUR / gap_s)) * gap_s for each in hours)
    start_s = gap_s * random.randrange(max(1, int((world.end_s - deadline_s) / gap_s)))
    terms = JobTerms(
        work_s=work_s,
        deadline_s=deadline_s,
        overhead_s=overhead_s,
        markets=world.markets,
        move_usd=world.move_usd,
    )
    return Case(row=row, world=world, start_s=start_s, terms=terms)


def _priced(zone: MarketSeries, ratio: float) -> MarketSeries:
    return replace(zone, usd_hr=[ratio * ON_DEMAND_USD] * len(zone.counts))


def _rotated(zone: MarketSeries, number: int) -> MarketSeries:
    """The zone as another region: its record is shifted cyclically by `number` thirds of its
    length.
    """
    turn = len(zone.counts) * number // 3
    market = replace(
        zone.market,
        name=f"{zone.market.name}-{number}",
        region=zone.market.region if number == 0 else f"{zone.market.region}-{number}",
    )
    return replace(
        zone,
        market=market,
        counts=[*zone.counts[turn:], *zone.counts[:turn]],
        usd_hr=[*zone.usd_hr[turn:], *zone.usd_hr[:turn]],
    )


def list_single(folder: str, random: Random, windows: int) -> Iterator[Case]:
    for zone in _zones(folder):
        world = _world([_priced(zone, 0.3)])
        for deadline in (52, 60, 70, 92):
            for overhead in (0.05, 0.2, 0.4)[: 1 + windows // 2]:
                for _ in range(max(1, windows // 3)):
                    hours = 48.0, float(deadline), overhead
                    yield _case(f"{deadline} h", world, random, hours, zone.gap_s)


def list_deadlines(folder: str, random: Random, windows: int) -> Iterator[Case]:
    for factor in (1.05, 1.1, 1.25, 1.5, 2.0, 3.0):
        for _ in range(windows):
            zones = random.sample(_zones(folder), 3)
            hours = 40.0, 40 * factor + 0.2, 0.2
            yield _case(f"deadline {factor:g}", _world(zones), random, hours, zones[0].gap_s)


def list_regions(folder: str, random: Random, windows: int) -> Iterator[Case]:
    every = [_rotated(zone, number) for number in range(3) for zone in _zones(folder)]
    for count in (1, 2, 4, 8, 13):
        for _ in range(windows):
            zones = random.sample(every, min(count, len(every)))
            world = _world(zones)
            yield _case(f"{count} regions", world, random, (40.0, 60.0, 0.2), zones[0].gap_s)


def list_checkpoints(folder: str, random: Random, windows: int) -> Iterator[Case]:
    for size_gb in (10, 50, 200, 500):
        for _ in range(windows):
            zones = random.sample(_zones(folder), 3)
            world = _world(zones, float(size_gb))
            yield _case(f"{size_gb} GB", world, random, (40.0, 60.0, 0.2), zones[0].gap_s)


def list_triple(folder: str, random: Random, windows: int) -> Iterator[Case]:
    named = [z for z in _zones(folder) if z.market.name.partition("_")[0] in TRIPLE]
    zones = named if len(named) == 3 else _zones(folder)[:3]
    for _ in range(2 * windows):
        yield _case("three zones", _world(zones), random, (40.0, 60.0, 0.2), zones[0].gap_s)


def list_prices(folder: str, random: Random, windows: int) -> Iterator[Case]:
    for ratio in (0.2, 0.4, 0.6, 0.8, 0.9, 0.95):
        for zone in _zones(folder):
            world = _world([_priced(zone, ratio)])
            for deadline in (52.0, 70.0):
                for _ in range(max(1, windows // 3)):
                    yield _case(
                        f"spot at {ratio}", world, random, (48.0, deadline, 0.2), zone.gap_s
                    )


TABLES: Mapping[str, Callable[[str, Random, int], Iterator[Case]]] = {
    "single": list_single,
    "deadlines": list_deadlines,
    "regions": list_regions,
    "checkpoints": list_checkpoints,
    "triple": list_triple,
    "prices": list_prices,
}


class Tally:
    """The dollars of each row and column, and the CPU time of the production policy's decisions."""

    def __init__(self) -> None:
        self.usd: dict[tuple[str, str], float] = {}
        self.jobs, self.missed, self.cpu_s = 0, 0, 0.0

    def add(self, row: str, column: str, usd: float) -> None:
        self.usd[row, column] = self.usd.get((row, column), 0.0) + usd

    def run(self, case: Case, policy: str, knows: Knows, margins: PolicyMargins) -> float:
        began = time.process_time()
        ran = run_job(
            case.world, case.start_s, case.terms, find_policy(policy), knows=knows, margins=margins
        )
        if policy == "auto":
            self.jobs, self.missed = self.jobs + 1, self.missed + ran.missed
            self.cpu_s += time.process_time() - began
        return ran.usd

    def print(self, table: str, rows: Sequence[str]) -> None:
        print(f"| {table} | {' | '.join(COLUMNS)} |\n|---|{'---|' * len(COLUMNS)}")
        for row in [*rows, "all"]:
            parts = rows if row == "all" else [row]
            cells = [self._ratio(table, parts, column) for column in COLUMNS]
            print(f"| {row} | {' | '.join(f'{cell:.3f}' for cell in cells)} |")
        speed = self.jobs / max(self.cpu_s, 1e-9)
        print(f"{self.jobs} jobs, {self.missed} missed, {speed:.0f} jobs per CPU second\n")

    def _ratio(self, table: str, rows: Sequence[str], column: str) -> float:
        ours = sum(self.usd[row, column] for row in rows)
        if table != "prices":
            return ours / sum(self.usd[row, "optimum"] for row in rows)
        best = (min(self.usd[row, f"{column}/{simple}"] for simple in SIMPLE) for row in rows)
        return ours / sum(best)


def measure(table: str, cases: Sequence[Case]) -> Tally:
    tally = Tally()
    for case in cases:
        if table != "prices":
            optimum = find_optimum(case.world, case.start_s, case.terms)
            tally.add(case.row, "optimum", optimum)
        for column, (knows, margins) in COLUMNS.items():
            tally.add(case.row, column, tally.run(case, "auto", knows, margins))
            for simple in SIMPLE if table == "prices" else ():
                usd = tally.run(case, simple, knows, NO_MARGINS)
                tally.add(case.row, f"{column}/{simple}", usd)
    return tally


def list_cases(table: str, folders: Sequence[str], windows: int) -> list[Case]:
    random = Random(f"{SEED}/{table}")
    return [case for folder in folders for case in TABLES[table](folder, random, windows)]


def run_held_out() -> Iterator[Mapping[str, object]]:
    """Yield a row for each job of the test months and each column."""
    for table in TABLES:
        if table == "prices":
            continue
        for number, case in enumerate(list_cases(table, TEST, HELD_OUT_WINDOWS)):
            optimum = find_optimum(case.world, case.start_s, case.terms)
            for policy, column in STORED.items():
                knows, margins = COLUMNS[column]
                auto = find_policy("auto")
                ran = run_job(
                    case.world, case.start_s, case.terms, auto, knows=knows, margins=margins
                )
                yield {
                    "table": table,
                    "row": case.row,
                    "number": number,
                    "zones": "+".join(market.name for market in case.world.markets),
                    "start_s": round(case.start_s),
                    "policy": policy,
                    "usd": f"{ran.usd:.6f}",
                    "optimum_usd": f"{optimum:.6f}",
                    "missed": int(ran.missed),
                    "launches": ran.launches,
                }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("tables", nargs="*", choices=[[], *TABLES])
    parser.add_argument("--test", action="store_true", help="use the test months")
    parser.add_argument("--windows", type=int, default=3, help="windows for each row")
    options = parser.parse_args()
    for table in options.tables or TABLES:
        cases = list_cases(table, TEST if options.test else TUNING, options.windows)
        rows = list(dict.fromkeys(case.row for case in cases))
        measure(table, cases).print(table, rows)


if __name__ == "__main__":
    main()

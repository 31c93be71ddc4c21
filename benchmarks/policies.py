"""Runs every spot policy over the public traces, stores each run, and writes
docs/measured/policies.md with its plots.

    python benchmarks/policies.py    # run all (about 15 minutes of CPU), then write the page
    python benchmarks/policies.py serving    # run these again: single, several, held-out, serving,
                                             # left-out, unseen, speed
    python benchmarks/policies.py --page     # write the page again from the runs that are kept

The traces are read from ../shared/data, or CAVVY_DATA. Each run is stored as one row in
benchmarks/results/*.csv.gz, and the page is made from these files only.
"""

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random

from left_out import run_left_out
from policies_page import keep, make_page, read_results
from spot import run_held_out
from unseen import run_unseen

from cavvy.capabilities.serving.autoscaler.placement import (
    PlacementPolicy,
    ServiceTerms,
    SpotHedge,
    SteadyPlacement,
)
from cavvy.capabilities.simulation.traces.driver import NO_MARGINS, Knows, run_job
from cavvy.capabilities.simulation.traces.fleet import read_jobs, read_pools, run_fleet
from cavvy.capabilities.simulation.traces.optimum import find_optimum
from cavvy.capabilities.simulation.traces.readers import (
    TraceWorld,
    list_traces,
    make_world,
    move_prices,
    read_egress,
    read_prices,
    read_series,
)
from cavvy.capabilities.simulation.traces.serving import read_capacity, serve, window
from cavvy.capabilities.simulation.traces.trials import (
    TraceMarkets,
    TrialResult,
    list_settings,
    plan_trials,
    run_trials,
)
from cavvy.planner.deadline.policy import PolicyMargins
from cavvy.planner.spot.classic import find_policy
from cavvy.planner.spot.view import JobTerms

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("CAVVY_DATA", ROOT.parent / "shared" / "data"))
HOUR = 3600.0
V100 = DATA / "traces/spot/availability/aws-02-15-2023"
WINDOWS, SEED = 20, 2026
OVERHEADS, DEADLINES = (0.02, 0.05, 0.1, 0.2, 0.4), (52, 60, 70, 92)
POLICIES = ("auto", "uniform-progress", "greedy")
# `auto` as in production, where it knows only launches, preemptions and prices: without margins,
# and with the margins for a task that writes a checkpoint every ten minutes
IN_PRODUCTION = {"auto-launches": NO_MARGINS, "auto-margins": PolicyMargins(again_s=600.0)}
_NAMES = {"auto-launches": "auto (launches only)", "auto-margins": "auto (with margins)"}
FEW_WINDOWS = 5  # slower runs use only the first windows
# SkyNomad's artifact, V100: the windows, the job and the zones of figure 9b of the paper
STARTS_HR = (179.725, 299.5417, 419.3583, 479.2667, 838.7167)
TRIPLE = ("us-east-1c", "us-east-2b", "us-west-2a")
SERVED = {"AWS1": 0.993, "AWS2": 0.976, "AWS3": 0.997, "GCP1": 0.998}
Row = Mapping[str, object]


def main() -> None:
    parts = {
        "single": run_single,
        "several": run_several,
        "held-out": run_held_out,
        "serving": run_serving,
        "left-out": run_left_out,
        "unseen": run_unseen,
        "speed": run_speed,
    }
    wanted = [name for name in sys.argv[1:] if name in parts] or (
        [] if "--page" in sys.argv else list(parts)
    )
    for name in wanted:
        started = time.process_time()
        keep(name, parts[name]())
        print(f"{name}: {time.process_time() - started:.0f} s of CPU")
    make_page(read_results())


def run_single() -> Iterator[Row]:
    """Simulate one market: nine zones, 20 combinations of deadline and overhead, three spot
    prices."""
    settings = list_settings(
        [48 * HOUR], [h * HOUR for h in DEADLINES], [h * HOUR for h in OVERHEADS]
    )
    for ratio in (0.3, 0.1, 0.7):
        worlds = [
            TraceMarkets(paths=(str(path),), spot_ratio=ratio) for path in list_traces([V100])
        ]
        for results in run_trials(
            plan_trials(worlds, settings, POLICIES, windows=WINDOWS, seed=SEED)
        ):
            for one in results:
                yield single(ratio, one.policy, one)
    for policy, margins in IN_PRODUCTION.items():
        worlds = [TraceMarkets(paths=(str(path),)) for path in list_traces([V100])]
        trials = plan_trials(
            worlds,
            settings,
            POLICIES[:1],
            windows=FEW_WINDOWS,
            seed=SEED,
            knows=Knows.LAUNCHES,
            margins=margins,
        )
        for results in run_trials(trials):
            for one in results:
                yield single(0.3, policy, one)


def single(ratio: float, policy: str, one: TrialResult) -> Row:
    return {
        "ratio": ratio,
        "policy": policy,
        "zone": one.world.partition("_")[0],
        "start_s": round(one.start_s),
        "deadline_hr": one.setting.deadline_s / HOUR,
        "overhead_hr": one.setting.overhead_s / HOUR,
        "usd": f"{one.run.usd:.6f}",
        "optimum_usd": f"{one.optimum_usd:.6f}",
        "missed": int(one.run.missed),
        "launches": one.run.launches,
    }


def run_several() -> Iterator[Row]:
    """Simulate several markets with real prices and egress: SkyNomad's five windows, then random
    zones and windows.
    """
    world = v100_world(TRIPLE)
    for hour in STARTS_HR:
        yield from several("skynomad", world, round(hour * HOUR / 195) * 195.0, 215_670.0)
    zones = [path.stem.partition("_")[0] for path in list_traces([V100])]
    random = Random(SEED)
    for number in range(90):
        world = v100_world(random.sample(zones, (3, 9)[number % 5 == 0]))
        length = round(143_780 * (1.25, 1.5, 2.0)[number % 3] / 195) * 195.0
        start = 195.0 * random.randrange(int((world.end_s - length) / 195))
        yield from several("random", world, start, length)


def several(kind: str, world: TraceWorld, start_s: float, deadline_s: float) -> Iterator[Row]:
    terms = JobTerms(
        work_s=143_780.0,
        deadline_s=deadline_s,
        overhead_s=720.0,
        markets=world.markets,
        move_usd=world.move_usd,
    )
    optimum = find_optimum(world, start_s, terms)
    runs = {
        policy: run_job(world, start_s, terms, find_policy(policy))
        for policy in (*POLICIES, "on-demand")
    }
    for policy, margins in IN_PRODUCTION.items():
        auto = find_policy("auto")
        runs[policy] = run_job(world, start_s, terms, auto, knows=Knows.LAUNCHES, margins=margins)
    for policy, run in runs.items():
        yield {
            "kind": kind,
            "policy": policy,
            "zones": "+".join(market.name.partition("_")[0] for market in world.markets),
            "start_s": round(start_s),
            "deadline_s": round(deadline_s),
            "usd": f"{run.usd:.6f}",
            "optimum_usd": f"{optimum:.6f}",
            "missed": int(run.missed),
            "launches": run.launches,
        }


def v100_world(zones: Sequence[str]) -> TraceWorld:
    prices = read_prices(DATA / "prices/v100_prices/v100_spot_prices.json")
    egress = read_egress(DATA / "prices/v100_prices/aws_egress_pricing.csv")
    names = [f"{zone}_v100_1" for zone in zones]
    series = [
        read_series(V100 / f"{name}.json", on_demand_usd_hr=3.06, prices=prices[name])
        for name in names
    ]
    return make_world(series, move_usd=move_prices([one.market for one in series], egress, 50.0))


def run_serving() -> Iterator[Row]:
    """Simulate three replicas for 24 h on the SpotHedge traces."""
    for name, availability in SERVED.items():
        capacity = read_capacity(
            DATA / "traces/spothedge" / name, tick_s=30.0, unlimited=name == "AWS3"
        )
        random = Random(f"{name}/{SEED}")
        for number in range(50):
            start = random.randrange(capacity.ticks - 2880)
            part = window(capacity, start, 2880)
            service = ServiceTerms(
                replicas=3,
                zones=len(part),
                cold_start_s=120,
                tick_s=30,
                availability=availability,
                regions=capacity.regions,
            )
            policies: dict[str, PlacementPolicy] = {
                "steady": SteadyPlacement(service),
                "spothedge": SpotHedge(service),
            }
            for policy, placing in policies.items():
                served = serve(part, service, placing)
                yield {
                    "trace": name,
                    "policy": policy,
                    "number": number,
                    "start_tick": start,
                    "cost": f"{100 * served.cost:.4f}",
                    "availability": f"{100 * served.availability:.4f}",
                    "floor": f"{100 * served.floor:.4f}",
                }


def run_speed() -> Iterator[Row]:
    """Measure simulated jobs per second of CPU time, without the time for the optimum, and the
    Philly queue.
    """
    worlds = {path: make_world([read_series(path)]) for path in list_traces([V100])}
    kinds = {policy: (Knows.EVERYTHING, NO_MARGINS) for policy in POLICIES}
    kinds |= {policy: (Knows.LAUNCHES, margins) for policy, margins in IN_PRODUCTION.items()}
    for policy, (knows, margins) in kinds.items():
        make = find_policy("auto" if policy in IN_PRODUCTION else policy)
        jobs, started = 0, time.process_time()
        while time.process_time() - started < 5:
            for number, world in enumerate(worlds.values()):
                for deadline in DEADLINES:
                    terms = JobTerms(
                        work_s=48 * HOUR,
                        deadline_s=deadline * HOUR,
                        overhead_s=720.0,
                        markets=world.markets,
                    )
                    start_s = 195.0 * (997 * number + jobs % 9000)
                    run_job(world, start_s, terms, make, knows=knows, margins=margins)
                    jobs += 1
        yield {
            "what": f"jobs per CPU second: {_NAMES.get(policy, policy)}",
            "value": f"{jobs / (time.process_time() - started):.0f}",
        }
    philly = DATA / "traces/philly"
    started = time.process_time()
    outcome = run_fleet(
        read_jobs(philly / "philly_jobs.parquet"), read_pools(philly / "philly_vc_nodes.csv", 8)
    )
    yield {"what": "Philly jobs through the queue", "value": outcome.jobs}
    yield {"what": "Philly jobs larger than their cluster", "value": outcome.left_out}
    yield {"what": "CPU seconds for them", "value": f"{time.process_time() - started:.2f}"}


if __name__ == "__main__":
    main()

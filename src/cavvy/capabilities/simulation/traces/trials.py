"""Runs many jobs under several policies on recorded markets, in several processes, and computes the
optimum of each job.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from random import Random
from zlib import crc32

from cavvy.capabilities.simulation.traces import readers
from cavvy.capabilities.simulation.traces.driver import NO_MARGINS, Knows, TraceRun, run_job
from cavvy.domain.values import Struct
from cavvy.planner.deadline.policy import PolicyMargins
from cavvy.planner.spot.classic import find_policy
from cavvy.planner.spot.view import JobTerms

_HOUR_S = 3600.0


class TraceMarkets(Struct, frozen=True, kw_only=True):
    """The trace files of one simulated world, and its prices. Each process caches the simulated
    world that it reads from these files, with this object as the cache's key.
    """

    paths: tuple[str, ...]
    on_demand_usd_hr: float = 1.0
    spot_ratio: float = 0.3
    nodes: int = 1
    prices: str | None = None
    egress: str | None = None
    checkpoint_gb: float = 50.0

    @property
    def name(self) -> str:
        return "+".join(Path(path).stem for path in self.paths)


class TrialSetting(Struct, frozen=True, kw_only=True):
    """The work, deadline and launch overhead of one job."""

    work_s: float
    deadline_s: float
    overhead_s: float

    def terms_in(self, world: readers.TraceWorld) -> JobTerms:
        return JobTerms(
            work_s=self.work_s,
            deadline_s=self.deadline_s,
            overhead_s=self.overhead_s,
            markets=world.markets,
            move_usd=world.move_usd,
        )


class PolicyTrial(Struct, frozen=True, kw_only=True):
    """A period of one set of recorded markets, and the settings and policies that are run in this
    period. `start_s` is the start of the window in seconds since the start of the record.
    """

    markets: TraceMarkets
    start_s: float
    settings: tuple[TrialSetting, ...]
    policies: tuple[str, ...]
    keep_segments: bool = False
    with_optimum: bool = True
    knows: Knows = Knows.EVERYTHING
    margins: PolicyMargins = NO_MARGINS


class TrialResult(Struct, frozen=True, kw_only=True):
    """One run of one policy. `optimum_usd` is the lowest possible cost for the same window and
    setting, or None if the optimum was not requested.
    """

    policy: str
    world: str
    markets: tuple[str, ...]
    start_s: float
    setting: TrialSetting
    run: TraceRun
    optimum_usd: float | None
    # The paths of the trace files. Paths identify the world, because files in two folders may have
    # the same names.
    files: tuple[str, ...] = ()


class PolicyScore(Struct, frozen=True, kw_only=True):
    """The result of one policy over many runs. `mean` is the total cost divided by the total
    optimum. `worst` is the highest ratio of cost to optimum in a single run.

    Values that need the optimum are None if the optimum was not computed.
    """

    mean: float | None
    worst: float | None
    mean_usd: float
    mean_optimum_usd: float | None
    missed: int
    runs: int


def plan_trials(
    worlds: Sequence[TraceMarkets],
    settings: Sequence[TrialSetting],
    policies: Sequence[str],
    *,
    windows: int,
    seed: int = 0,
    keep_segments: bool = False,
    with_optimum: bool = True,
    knows: Knows = Knows.EVERYTHING,
    margins: PolicyMargins = NO_MARGINS,
) -> list[PolicyTrial]:
    """Choose random start times in each world; `windows` is their number. The start times are
    multiples of a tick and depend only on the world's name and the seed, so all settings and
    policies are run in the same windows.

    Raises TraceError if a record is shorter than the longest deadline.
    """
    longest = max(setting.deadline_s for setting in settings)
    trials = []
    for markets in worlds:
        gap_s, length_s = _extent(markets)
        if length_s < longest:
            raise readers.TraceError(
                f"{markets.name}: the record is {length_s / _HOUR_S:.0f} h long; "
                f"a deadline of {longest / _HOUR_S:.0f} h does not fit into the record"
            )
        ticks = max(1, int((length_s - longest) / gap_s))
        random = Random(crc32(f"{markets.name}/{seed}".encode()))
        trials += [
            PolicyTrial(
                markets=markets,
                start_s=gap_s * random.randrange(ticks),
                settings=tuple(settings),
                policies=tuple(policies),
                keep_segments=keep_segments,
                with_optimum=with_optimum,
                knows=knows,
                margins=margins,
            )
            for _ in range(windows)
        ]
    return trials


def run_trials(trials: Sequence[PolicyTrial], processes: int = 1) -> Iterator[list[TrialResult]]:
    """Yield the results of each trial, in the order of the trials."""
    if processes <= 1:
        yield from map(run_trial, trials)
        return
    # The start method "fork" is unsafe with threads.
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        yield from pool.map(
            run_trial, trials, chunksize=max(1, min(8, len(trials) // (4 * processes)))
        )


def run_trial(trial: PolicyTrial) -> list[TrialResult]:
    """Run all settings and policies of one window."""
    world = _world(trial.markets)
    results = []
    for setting in trial.settings:
        terms = setting.terms_in(world)
        optimum = _optimum(world, trial.start_s, terms) if trial.with_optimum else None
        results += [
            TrialResult(
                policy=policy,
                world=trial.markets.name,
                markets=tuple(market.name for market in world.markets),
                start_s=trial.start_s,
                setting=setting,
                run=run_job(
                    world,
                    trial.start_s,
                    terms,
                    find_policy(policy),
                    knows=trial.knows,
                    margins=trial.margins,
                    keep_segments=trial.keep_segments,
                ),
                optimum_usd=optimum,
                files=trial.markets.paths,
            )
            for policy in trial.policies
        ]
    return results


def list_settings(
    works_s: Sequence[float], deadlines_s: Sequence[float], overheads_s: Sequence[float]
) -> list[TrialSetting]:
    """Return every combination of work, deadline and overhead. Raises TraceError if a combination
    cannot meet its deadline even on demand.
    """
    settings = []
    for work, deadline, overhead in product(works_s, deadlines_s, overheads_s):
        if work + overhead > deadline:
            raise readers.TraceError(
                f"{work / _HOUR_S:g} h of work and {overhead / _HOUR_S:g} h of overhead "
                f"do not fit into a deadline of {deadline / _HOUR_S:g} h"
            )
        settings.append(TrialSetting(work_s=work, deadline_s=deadline, overhead_s=overhead))
    return settings


class ResultTally:
    """Collects results by a key of any kind and computes the score of each key."""

    def __init__(self) -> None:
        self._results: dict[object, list[TrialResult]] = {}

    def add(self, key: object, result: TrialResult) -> None:
        self._results.setdefault(key, []).append(result)

    def scores(self) -> dict[object, PolicyScore]:
        return {key: _score(results) for key, results in self._results.items()}


def _score(results: Sequence[TrialResult]) -> PolicyScore:
    runs = len(results)
    usd = sum(result.run.usd for result in results)
    optima = [result.optimum_usd for result in results if result.optimum_usd is not None]
    complete, total = len(optima) == runs, sum(optima)
    pairs = zip(results, optima, strict=True) if complete else ()
    return PolicyScore(
        mean=usd / total if complete and total else None,
        worst=max((result.run.usd / optimum for result, optimum in pairs if optimum), default=None),
        mean_usd=usd / runs,
        mean_optimum_usd=total / runs if complete else None,
        missed=sum(result.run.missed for result in results),
        runs=runs,
    )


def _optimum(world: readers.TraceWorld, start_s: float, terms: JobTerms) -> float:
    # Imported only here: numpy is an optional dependency that only the optimum needs.
    from cavvy.capabilities.simulation.traces.optimum import find_optimum

    return find_optimum(world, start_s, terms)


@lru_cache(maxsize=32)
def _world(markets: TraceMarkets) -> readers.TraceWorld:
    series = _read(markets)
    moves: tuple[tuple[float, ...], ...] = ()
    if markets.egress is not None:
        moves = readers.move_prices(
            [one.market for one in series],
            readers.read_egress(Path(markets.egress)),
            markets.checkpoint_gb,
        )
    return readers.make_world(series, markets.nodes, moves)


def _read(markets: TraceMarkets) -> list[readers.MarketSeries]:
    known = readers.read_prices(Path(markets.prices)) if markets.prices is not None else {}
    return [
        readers.read_series(
            Path(path),
            spot_ratio=markets.spot_ratio,
            on_demand_usd_hr=markets.on_demand_usd_hr,
            prices=known.get(Path(path).stem),
        )
        for path in markets.paths
    ]


def _extent(markets: TraceMarkets) -> tuple[float, float]:
    """Return two values in seconds: the longest time step among the markets' records, and the
    duration of the shortest record.
    """
    series = _read(markets)
    return max(one.gap_s for one in series), min(one.length_s for one in series)

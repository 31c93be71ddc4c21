"""Reads and runs a scenario file. The file has markets, jobs and a fleet in YAML, and is simulated
in the same way as recorded traces.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import yaml

from cavvy.capabilities.simulation.traces.driver import TraceRun, run_job
from cavvy.capabilities.simulation.traces.fleet import TraceArrival
from cavvy.capabilities.simulation.traces.readers import (
    MarketSeries,
    TraceError,
    make_world,
    move_prices,
    read_series,
    region_of,
)
from cavvy.capabilities.simulation.traces.trials import TrialResult, TrialSetting
from cavvy.domain.units import UnitError, parse_duration
from cavvy.domain.values import Struct, replace
from cavvy.planner.spot.classic import ALIASES, POLICIES, find_policy
from cavvy.planner.spot.view import PolicyMarket

T = TypeVar("T")
_GAP_S = 60.0  # length of a tick in markets that the file defines itself, without a trace
_MOST_JOBS = 1_000_000


class SpotJob(Struct, frozen=True, kw_only=True):
    """One job with a deadline."""

    name: str
    setting: TrialSetting
    start_s: float = 0.0
    nodes: int = 1
    checkpoint_gb: float = 0.0


class TraceFleet(Struct, frozen=True, kw_only=True):
    """Jobs that wait in the queues of virtual clusters: the number of GPUs in each cluster, and the
    arrivals of jobs.
    """

    pools: Mapping[str, int]
    arrivals: Sequence[TraceArrival]


class TraceScenario(Struct, frozen=True, kw_only=True):
    """The content of one file: jobs with markets, a fleet, or both."""

    name: str
    policies: Sequence[str]
    series: Sequence[MarketSeries]
    egress_usd_gb: float
    jobs: Sequence[SpotJob]
    fleet: TraceFleet | None


def read_scenario(path: Path) -> TraceScenario:
    """Read a scenario file. Raises TraceError, which describes the mistake in the file."""
    document = _read_document(path)
    top = _Table(document, str(path))
    top.only("name", "policies", "markets", "jobs", "fleet", "egress_usd_per_gb")
    policies = _policies(top)
    jobs = [_job(_Table(each, f"{path}: jobs[{n}]"), n) for n, each in enumerate(top.items("jobs"))]
    length_s = max((job.start_s + job.setting.deadline_s for job in jobs), default=0.0)
    markets = [_Table(each, f"{path}: markets[{n}]") for n, each in enumerate(top.items("markets"))]
    series = [_market(each, path.parent, length_s) for each in markets]
    fleet = top.get("fleet")
    if bool(jobs) != bool(series):
        raise TraceError(
            f"{path}: `jobs` and `markets` must both be stated, but one of them is missing"
        )
    if not jobs and fleet is None:
        raise TraceError(f"{path}: expected `markets` with `jobs`, or `fleet`, or both")
    for job in jobs:
        _check_length(path, job, series)
    return TraceScenario(
        name=str(top.get("name") or path.stem),
        policies=policies,
        series=series,
        egress_usd_gb=top.number("egress_usd_per_gb", 0.0),
        jobs=jobs,
        fleet=None if fleet is None else _fleet(_Table(fleet, f"{path}: fleet")),
    )


def _read_document(path: Path) -> object:
    try:
        return yaml.safe_load(path.read_text())
    except OSError as error:
        raise TraceError(f"{path}: the file cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise TraceError(f"{path}: not a YAML file; expected text in UTF-8") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise TraceError(f"{path}{where}: not a YAML file; expected `key: value` lines") from None


def _policies(top: "_Table") -> list[str]:
    """Return the policies of a scenario. The default is Cavvy's own policy and, for comparison, two
    simpler policies.
    """
    policies = [str(name) for name in top.items("policies")]
    for name in policies:
        if name not in POLICIES and name not in ALIASES:
            raise TraceError(
                f"{top.where}: policies: expected one of {', '.join(POLICIES)}, not {name!r}"
            )
    return policies or ["auto", "uniform-progress", "greedy"]


def run_scenario(
    scenario: TraceScenario, *, keep_segments: bool, with_optimum: bool
) -> Iterator[TrialResult]:
    """Run every job under every policy, and compute the optimum of each job if requested."""
    egress = _egress(scenario)
    for job in scenario.jobs:
        moves = move_prices([one.market for one in scenario.series], egress, job.checkpoint_gb)
        world = make_world(scenario.series, job.nodes, moves)
        setting = job.setting
        terms = setting.terms_in(world)
        optimum = None
        if with_optimum:
            from cavvy.capabilities.simulation.traces.optimum import find_optimum

            optimum = find_optimum(world, job.start_s, terms)
        for policy in scenario.policies:
            run = run_job(
                world, job.start_s, terms, find_policy(policy), keep_segments=keep_segments
            )
            yield TrialResult(
                policy=policy,
                world=job.name,
                markets=tuple(market.name for market in world.markets),
                start_s=job.start_s,
                setting=setting,
                run=run if job.nodes == 1 else _for_nodes(run, job.nodes),
                optimum_usd=None if optimum is None else optimum * job.nodes,
            )


def _for_nodes(run: TraceRun, nodes: int) -> TraceRun:
    """Multiply the costs of a run by the number of nodes, because prices are for one node."""
    segments = tuple(replace(segment, usd=segment.usd * nodes) for segment in run.segments)
    return replace(run, usd=run.usd * nodes, segments=segments)


def _egress(scenario: TraceScenario) -> dict[tuple[str, str], float]:
    regions = {one.market.region for one in scenario.series}
    return {
        (one, other): scenario.egress_usd_gb for one in regions for other in regions if one != other
    }


def _check_length(path: Path, job: SpotJob, series: Sequence[MarketSeries]) -> None:
    for one in series:
        if one.length_s < job.start_s + job.setting.deadline_s:
            raise TraceError(
                f"{path}: the record of {one.market.name} covers {one.length_s / 3600:.0f} h, but "
                f"the simulation of {job.name} needs a record of "
                f"{(job.start_s + job.setting.deadline_s) / 3600:.0f} h, which ends at the job's "
                "deadline"
            )


def _job(table: "_Table", number: int) -> SpotJob:
    table.only("name", "work", "deadline", "overhead", "start", "nodes", "checkpoint_gb")
    setting = TrialSetting(
        work_s=table.length("work"),
        deadline_s=table.length("deadline"),
        overhead_s=table.length("overhead", 0.0),
    )
    if setting.work_s + setting.overhead_s > setting.deadline_s:
        raise TraceError(f"{table.where}: `work` plus `overhead` is longer than `deadline`")
    return SpotJob(
        name=str(table.get("name") or f"job-{number + 1}"),
        setting=setting,
        start_s=table.length("start", 0.0),
        nodes=table.whole("nodes", 1),
        checkpoint_gb=table.number("checkpoint_gb", 0.0),
    )


def _market(table: "_Table", folder: Path, length_s: float) -> MarketSeries:
    table.only("name", "region", "on_demand", "spot", "trace", "available")
    name, on_demand = str(table.get("name") or ""), table.number("on_demand")
    if not name:
        raise TraceError(f"{table.where}.name: expected a name")
    trace = table.get("trace")
    if trace is not None:
        series = read_series(folder / str(trace), on_demand_usd_hr=on_demand)
        ticks, gap_s, counts = len(series.counts), series.gap_s, series.counts
    else:
        ticks, gap_s = int(length_s / _GAP_S) + 1, _GAP_S
        counts = [0] * ticks
        for number, span in enumerate(table.items("available")):
            start, end = table.pair(span, f"available[{number}]")
            for tick in range(int(start / gap_s), min(ticks, int(end / gap_s))):
                counts[tick] = _MOST_JOBS
    market = PolicyMarket(
        name=name, region=str(table.get("region") or region_of(name)), on_demand_usd_hr=on_demand
    )
    return MarketSeries(
        market=market, gap_s=gap_s, counts=counts, usd_hr=_prices(table, ticks, gap_s)
    )


def _prices(table: "_Table", ticks: int, gap_s: float) -> list[float]:
    """Return the spot price of each tick. The file has a single price, or a list of pairs [since,
    price]."""
    if not isinstance(table.get("spot"), list):
        return [table.number("spot")] * ticks
    steps = sorted(
        (table.length_of(step, "spot"), table.price_of(step, "spot"))
        for step in table.items("spot")
    )
    prices, index = [], 0
    for tick in range(ticks):
        while index + 1 < len(steps) and steps[index + 1][0] <= tick * gap_s:
            index += 1
        prices.append(steps[index][1])
    return prices


def _fleet(table: "_Table") -> TraceFleet:
    table.only("pools", "gpus_per_node", "jobs")
    per_node = table.whole("gpus_per_node", 8)
    pools = table.get("pools")
    if not isinstance(pools, dict) or not all(
        isinstance(nodes, int) and nodes > 0 for nodes in pools.values()
    ):
        raise TraceError(
            f"{table.where}.pools: expected the number of nodes for each name, such as "
            "{research: 4}"
        )
    arrivals: list[TraceArrival] = []
    for number, each in enumerate(table.items("jobs")):
        job = _Table(each, f"{table.where}.jobs[{number}]")
        job.only("pool", "gpus", "arrival", "duration", "count", "every")
        count, every, first = (
            job.whole("count", 1),
            job.length("every", 0.0),
            job.length("arrival", 0.0),
        )
        length, gpus, pool = job.length("duration"), job.whole("gpus", 1), str(job.get("pool"))
        if pool not in pools:
            raise TraceError(f"{job.where}.pool: the pool {pool!r} does not exist")
        arrivals += [
            TraceArrival(first + every * index, length, gpus, pool)
            for index in range(min(count, _MOST_JOBS))
        ]
    arrivals.sort(key=lambda one: one.arrival_s)
    return TraceFleet(
        pools={str(name): nodes * per_node for name, nodes in pools.items()}, arrivals=arrivals
    )


class _Table:
    """A YAML mapping in the scenario file. The error messages of a table name the position in the
    file.
    """

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise TraceError(f"{where}: expected a table, not {type(value).__name__}")
        self._value, self.where = value, where

    def only(self, *names: str) -> None:
        for name in self._value:
            if name not in names:
                raise TraceError(f"{self.where}: unknown key {name!r}; expected {', '.join(names)}")

    def get(self, name: str) -> object:
        return self._value.get(name)

    def items(self, name: str) -> list[object]:
        value = self._value.get(name, [])
        if not isinstance(value, list):
            raise TraceError(f"{self.where}.{name}: expected a list")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        return self._read(name, default, _number, "a number of 0 or more")

    def whole(self, name: str, default: int) -> int:
        return self._read(name, default, _whole, "a whole number above 0")

    def length(self, name: str, default: float | None = None) -> float:
        return self._read(name, default, _length, "a length of time such as 90m or 48h")

    def pair(self, value: object, name: str) -> tuple[float, float]:
        if not isinstance(value, list) or len(value) != 2:
            raise TraceError(f"{self.where}.{name}: expected [from, to], such as [0h, 10h]")
        return self.length_of(value, name), self.length_of(value[1:], name)

    def length_of(self, value: object, name: str) -> float:
        return self._convert(
            value[0] if isinstance(value, list) and value else value,
            name,
            _length,
            "a length of time",
        )

    def price_of(self, value: object, name: str) -> float:
        if not isinstance(value, list) or len(value) != 2:
            raise TraceError(f"{self.where}.{name}: expected [since, price], such as [12h, 1.40]")
        return self._convert(value[1], name, _number, "a price")

    def _read(self, name: str, default: T | None, convert: Callable[[object], T], words: str) -> T:
        value = self._value.get(name)
        if value is None and default is not None:
            return default
        return self._convert(value, name, convert, words)

    def _convert(self, value: object, name: str, convert: Callable[[object], T], words: str) -> T:
        try:
            return convert(value)
        except (ValueError, TypeError, UnitError):
            raise TraceError(f"{self.where}.{name}: expected {words}, not {value!r}") from None


def _number(value: object) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 0 <= value < float("inf")
    ):
        raise ValueError
    return float(value)


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError
    return value


def _length(value: object) -> float:
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise ValueError
    return parse_duration(value).total_seconds()

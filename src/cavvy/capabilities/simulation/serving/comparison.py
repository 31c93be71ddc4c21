"""Compares ways to run a service on the same requests: always on, scaled down to zero, with one
replica kept, a mix with spot, a managed endpoint, and serverless GPUs. Costs are per month of 730.5
hours.

Plots simulated services: the cost for each share of requests that were answered in time, the
number of replicas over time, and the costs of several ways to run the same service. Requires
matplotlib.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from itertools import pairwise
from math import ceil, exp, log
from pathlib import Path
from random import Random

from matplotlib.figure import Figure

from cavvy.capabilities.serving.autoscaler.terms import ScalingTerms
from cavvy.capabilities.simulation.serving.requests import RequestTrace
from cavvy.capabilities.simulation.serving.run import (
    AutoscalerController,
    ServingScore,
    on_demand_market,
    run_service,
)
from cavvy.capabilities.simulation.serving.service import (
    ReplicaMarket,
    ServiceSetting,
    SimulatedService,
)
from cavvy.capabilities.simulation.traces.plots import save_figure
from cavvy.domain.values import Struct, replace

MONTH_HOURS = 730.5
_JITTER_S = 30.0  # copies of a request arrive within this time of it
_DAY_S = 86_400.0


class ServingWay(StrEnum):
    """A way to run a service."""

    ALWAYS_ON = "always on"
    ONE_KEPT = "one kept"
    TO_ZERO = "to zero"
    SPOT_MIX = "spot mix"
    MANAGED = "managed endpoint"
    SERVERLESS = "serverless"


class WayCost(Struct, frozen=True, kw_only=True):
    """The monthly cost of one way to run the service, or None if its price is unknown. Some ways
    are not simulated; for these, the share of requests on time, the 99th percentile of the waits,
    and the maximum number of replicas are None. `limited` is whether the service would need more
    replicas than it may have for enough requests on time.
    """

    way: ServingWay
    usd_month: float | None
    on_time: float | None = None
    wait_p99_s: float | None = None
    most: int | None = None
    limited: bool = False


class LoadCosts(Struct, frozen=True, kw_only=True):
    """The ways to run the service under one load."""

    factor: float  # of the recorded load
    per_day: float
    costs: Sequence[WayCost]


class WayCrossing(Struct, frozen=True, kw_only=True):
    """The load at which another way to run the service becomes the cheapest: `below` is the
    cheapest way with fewer than `per_day` requests a day, and `above` is the cheapest way with more
    than `per_day` requests a day.
    """

    per_day: float
    below: ServingWay
    above: ServingWay


class ComparisonTerms(Struct, frozen=True, kw_only=True):
    """What is compared. `managed_usd_hr` is the hourly price of a replica of a managed endpoint,
    and `serverless_usd_hr` is the hourly price of a serverless GPU while it works. Unknown prices
    are None. `spot` contains the spot markets of a mix with on-demand, or is () if no mix is
    compared.
    """

    scaling: ScalingTerms
    setting: ServiceSetting
    spot: Sequence[ReplicaMarket] = ()
    managed_usd_hr: float | None = None
    serverless_usd_hr: float | None = None


def compare_ways(trace: RequestTrace, terms: ComparisonTerms, factor: float = 1.0) -> LoadCosts:
    """Return the cost of each way to run the service under the trace's load. The trace is assumed
    to cover whole days.
    """
    days = max(1, ceil(trace.length_s / _DAY_S))
    load = scale_load(trace, factor, terms.setting.seed)
    months = days * 24 / MONTH_HOURS
    kept = replace(terms.scaling, least=max(1, terms.scaling.least))
    demand = on_demand_market(terms.setting)
    costs = [
        *_cost_steady(load, terms, months),
        _scaled(ServingWay.ONE_KEPT, load, terms, kept, [demand], months),
        _scaled(ServingWay.TO_ZERO, load, terms, replace(kept, least=0), [demand], months),
        WayCost(way=ServingWay.SPOT_MIX, usd_month=None)
        if not terms.spot
        else _scaled(
            ServingWay.SPOT_MIX, load, terms, terms.scaling, [demand, *terms.spot], months
        ),
    ]
    costs.sort(key=lambda each: list(ServingWay).index(each.way))
    return LoadCosts(factor=factor, per_day=len(load.arrivals_s) / days, costs=costs)


def add_groups(groups: Sequence[Sequence[LoadCosts]], fixed_usd_hr: float) -> Sequence[LoadCosts]:
    """Return the costs of a whole service, from those of its groups of replicas under the same
    loads, and from what its routers cost in an hour. A request is on time if it is in each group.
    """
    return [
        replace(
            each[0],
            costs=[
                _add(costs, fixed_usd_hr)
                for costs in zip(*(one.costs for one in each), strict=True)
            ],
        )
        for each in zip(*groups, strict=True)
    ]


def _add(costs: Sequence[WayCost], fixed_usd_hr: float) -> WayCost:
    def known(name: str) -> list[float]:
        return [value for each in costs if (value := getattr(each, name)) is not None]

    usd = known("usd_month")
    return WayCost(
        way=costs[0].way,
        usd_month=sum(usd) + fixed_usd_hr * MONTH_HOURS if len(usd) == len(costs) else None,
        on_time=min(known("on_time"), default=None),
        wait_p99_s=max(known("wait_p99_s"), default=None),
        most=int(sum(known("most"))) if known("most") else None,
        limited=any(each.limited for each in costs),
    )


def _cost_steady(load: RequestTrace, terms: ComparisonTerms, months: float) -> list[WayCost]:
    """Return the costs of running the service in each way that needs no autoscaler, and therefore
    no simulation.
    """
    steady = find_steady(load, terms)
    busy_hours = find_busy_s(load, terms.scaling.concurrency) / 3600
    demand, managed = terms.setting.on_demand_usd_hr, terms.managed_usd_hr
    endpoint = None if managed is None else steady.most * managed * MONTH_HOURS
    serverless = terms.serverless_usd_hr
    late = steady.on_time < terms.scaling.on_time  # with the largest number
    return [
        _cost(ServingWay.ALWAYS_ON, steady, steady.most * demand * MONTH_HOURS, late),
        _cost(ServingWay.MANAGED, steady, endpoint, late),
        WayCost(
            way=ServingWay.SERVERLESS,
            usd_month=None if serverless is None else busy_hours * serverless / months,
        ),
    ]


def find_busy_s(load: RequestTrace, concurrency: int) -> float:
    """Return the total working time of the replicas of an ideal service, in seconds. An ideal
    service starts each request on arrival and never uses more replicas than the requests in flight
    need.
    """
    changes = [(at, 1) for at in load.arrivals_s]
    changes += [(at + work, -1) for at, work in zip(load.arrivals_s, load.services_s, strict=True)]
    busy, in_flight, since = 0.0, 0, 0.0
    for at, change in sorted(changes):
        busy += ceil(in_flight / concurrency) * (at - since)
        in_flight, since = in_flight + change, at
    return busy


def find_steady(load: RequestTrace, terms: ComparisonTerms) -> ServingScore:
    """Return the run with the smallest constant number of replicas that serves enough requests on
    time, or the run with the maximum number of replicas if no number is enough.
    """
    most = terms.scaling.most
    few = max(1, int(load.work_s / max(load.length_s, 1.0) / terms.scaling.concurrency))
    low, high = 0, min(few, most)
    found = _run_steady(load, terms, high)
    while found.on_time < terms.scaling.on_time and high < most:
        low, high = high, min(2 * high, most)
        found = _run_steady(load, terms, high)
    while high - low > 1:
        middle = (low + high) // 2
        tried = _run_steady(load, terms, middle)
        if tried.on_time >= terms.scaling.on_time:
            high, found = middle, tried
        else:
            low = middle
    return found


def scale_load(trace: RequestTrace, factor: float, seed: int) -> RequestTrace:
    """Return the trace with `factor` times its requests. To reach the new number of requests, some
    requests are omitted or copied. A copy arrives within half a minute of its original.
    """
    if factor == 1:
        return trace
    random, found = Random(seed), list[tuple[float, int]]()
    for number, at in enumerate(trace.arrivals_s):
        copies = int(factor) + (random.random() < factor % 1)
        for copy in range(copies):
            jitter = random.uniform(-_JITTER_S, _JITTER_S) if copy else 0.0
            found.append((min(max(0.0, at + jitter), trace.length_s), number))
    found = sorted(found) or [(trace.arrivals_s[0], 0)]
    return RequestTrace(
        name=trace.name,
        arrivals_s=tuple(at for at, _ in found),
        services_s=tuple(trace.services_s[number] for _, number in found),
        tokens=tuple(trace.tokens[number] for _, number in found) if trace.tokens else (),
    )


def find_crossings(loads: Sequence[LoadCosts]) -> Sequence[WayCrossing]:
    """Return the loads at which the cheapest way to run the service changes. Between two
    neighbouring loads, the logarithms of the costs are interpolated.
    """
    found = []
    ordered = sorted(loads, key=lambda each: each.per_day)
    for lower, upper in pairwise(ordered):
        before, after = _known(lower), _known(upper)
        below, above = min(before, key=before.__getitem__), min(after, key=after.__getitem__)
        if below is above:
            continue
        start = log(before[above] / before[below])
        end = log(after[above] / after[below])
        share = start / (start - end)
        span = log(upper.per_day / lower.per_day)
        per_day = lower.per_day * exp(share * span)
        found.append(WayCrossing(per_day=per_day, below=below, above=above))
    return found


class FixedReplicas:
    """A rule that always requests a constant number of replicas."""

    interval_s, holds = 1, True

    def __init__(self, count: int) -> None:
        self._count = count

    def order(self, service: SimulatedService) -> Sequence[int]:
        return [self._count]

    def watch(self, service: SimulatedService) -> None:
        """Return the constant number of replicas, regardless of the load."""


def _run_steady(load: RequestTrace, terms: ComparisonTerms, count: int) -> ServingScore:
    found = run_service("steady", load, terms.setting, FixedReplicas(count), ready=count)
    return replace(found, most=count)


def _scaled(
    way: ServingWay,
    load: RequestTrace,
    terms: ComparisonTerms,
    scaling: ScalingTerms,
    markets: Sequence[ReplicaMarket],
    months: float,
) -> WayCost:
    controller = AutoscalerController(scaling)
    score = run_service(way, load, terms.setting, controller, markets)
    # for the rest of the last day, the minimum number of replicas is billed
    rest_h = max(0.0, months * MONTH_HOURS - load.length_s / 3600)
    usd = score.usd + rest_h * scaling.least * terms.setting.on_demand_usd_hr
    limited = controller.limited > 0 and score.on_time < scaling.on_time
    return _cost(way, score, usd / months, limited)


def _cost(way: ServingWay, score: ServingScore, usd_month: float | None, limited: bool) -> WayCost:
    return WayCost(
        way=way,
        usd_month=usd_month,
        on_time=score.on_time,
        wait_p99_s=score.wait_s[2],
        most=score.most,
        limited=limited,
    )


def _known(load: LoadCosts) -> Mapping[ServingWay, float]:
    return {each.way: each.usd_month for each in load.costs if each.usd_month is not None}


def bound_replica_hours(trace: RequestTrace, setting: ServiceSetting) -> float:
    """Return a lower bound of the replica-hours of any schedule that serves all requests.

    Each request occupies one slot for its service time, and a replica has `concurrency` slots, so
    the billed replica time is at least the sum of the service times divided by the number of slots.
    The bound assumes that all slots are in use while a replica is billed, and that replicas start
    immediately; real optima are higher.
    """
    return trace.work_s / setting.concurrency / 3600.0


def plot_scores(scores: Sequence[ServingScore], bound: float, path: Path) -> None:
    """Plot the late requests against the replica-hours of each run; points further left and lower
    are better. The dashed line is the lower bound.
    """
    figure = Figure(figsize=(6.4, 4.4), layout="constrained")
    panel = figure.subplots()
    for rule in dict.fromkeys(score.rule for score in scores):
        points = sorted(
            (score.replica_hours, 100 * (1 - score.on_time))
            for score in scores
            if score.rule == rule
        )
        panel.plot(
            [hours for hours, _ in points], [late for _, late in points], marker="o", label=rule
        )
    panel.axvline(bound, color="black", linestyle="--", linewidth=0.8)
    panel.set_xlabel("replica-hours; dashed: lower bound")
    panel.set_ylabel("requests late or failed, %")
    panel.set_title(scores[0].trace)
    panel.grid(alpha=0.3)
    panel.legend()
    save_figure(figure, path)


def plot_replicas(scores: Sequence[ServingScore], path: Path) -> None:
    """Plot the ready replicas and the waiting requests of each run over time."""
    figure = Figure(figsize=(9, 5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    for score in scores:
        hours = [at / 3600.0 for at, *_ in score.history]
        above.step(hours, [each[1] for each in score.history], where="post", label=score.rule)
        below.step(hours, [each[3] for each in score.history], where="post", linewidth=0.8)
    above.set_ylabel("ready replicas")
    below.set_ylabel("waiting requests")
    below.set_xlabel("hours")
    above.legend(fontsize="small")
    for panel in (above, below):
        panel.grid(alpha=0.3)
    save_figure(figure, path)


def plot_costs(loads: Sequence[LoadCosts], crossings: Sequence[WayCrossing], path: Path) -> None:
    """Plot the monthly cost of each way to run the service against the requests per day. Dotted
    lines mark the loads at which another way becomes the cheapest. The dashed line marks the
    recorded load.
    """
    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    panel = figure.subplots()
    ordered = sorted(loads, key=lambda each: each.per_day)
    for at, first in enumerate(ordered[0].costs):
        points = [(each.per_day, each.costs[at].usd_month) for each in ordered]
        known = [(load, cost) for load, cost in points if cost is not None]
        if known:
            panel.plot(*zip(*known, strict=True), marker="o", label=first.way)
    for each in crossings:
        panel.axvline(each.per_day, color="grey", linestyle=":", linewidth=0.8)
    for load in loads:
        if load.factor == 1:
            panel.axvline(load.per_day, color="black", linestyle="--", linewidth=0.8)
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.set_xlabel("requests per day (dashed line: recorded load)")
    panel.set_ylabel("$ per month")
    panel.grid(alpha=0.3, which="both")
    panel.legend(fontsize="small")
    save_figure(figure, path)
